"""Puts the files of all ranks of a recorded training together, shards by their places.

A resumed training stands beside one that went on: what it starts with is what the other one held.
Legend of shapes: Q parts of a tensor by position; k numbers in a sketch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.bus.messages import PackedError
from rankscope.bus.parity import FOLDER, HELD, MOMENT, RankStep
from rankscope.errors import RunError
from rankscope.files import read_file
from rankscope.stats.arrays import Floats, Ints

_MOST_BYTES = 1 << 31
_SAME_COPY = 1e-5


@dataclass(frozen=True, slots=True)
class Whole:
    """Sums of squares and linear sketches of one whole tensor."""

    squares_Q: Floats
    sketches_QK: Floats

    @property
    def norm(self) -> float:
        """Its norm."""
        return float(np.sqrt(self.squares_Q.sum()))


@dataclass(frozen=True, slots=True)
class Unequal:
    """Copies of one tensor on ``ranks`` that differ from that of the first rank that has one.

    ``relative`` is the largest distance, over the norm.
    """

    kind: str
    name: str
    ranks: tuple[int, ...]
    relative: float


@dataclass(slots=True)
class SideStep:
    """One step of a training, of all its ranks.

    ``figures`` are by kind and name; ``samples`` are the identities of the global batch, each as
    often as it was drawn, on the ranks ``sample_ranks``; ``labels`` are number and digest of the
    label tokens (None if unknown); ``losses`` are of micro-batches and samples, with their label
    tokens ``weights`` (NaN if unknown); ``multipliers`` lie between losses and what ``backward``
    was called on; ``counters`` are the optimizer's by parameter; ``facts`` are those of the first
    rank; ``random`` holds digests of the generators, by rank.
    """

    figures: dict[str, dict[str, Whole]] = field(default_factory=dict)
    unequal: list[Unequal] = field(default_factory=list)
    samples: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    sample_ranks: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    labels: tuple[int, int] | None = None
    losses: Floats = field(default_factory=lambda: np.empty(0))
    weights: Floats = field(default_factory=lambda: np.empty(0))
    multipliers: Floats = field(default_factory=lambda: np.empty(0))
    counters: dict[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    random: dict[int, Mapping[str, str]] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The mean loss: per label token if their numbers are known, else over micro-batches."""
        known = len(self.weights) and bool(np.isfinite(self.weights).all())
        if not len(self.losses):
            return float("nan")
        if known and self.weights.sum() > 0:
            return float((self.losses * self.weights).sum() / self.weights.sum())
        return float(self.losses.mean())


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded training; ``passes`` are the micro-batches of a step and worker.

    ``compute`` is the coarsest type that a layer has returned; the layers ``drew`` random numbers;
    ``drawn``: some were drawn inside the forward pass.
    """

    name: str
    steps: Mapping[int, SideStep]
    shapes: Mapping[str, tuple[int, ...]]
    world: int
    workers: int
    passes: int
    types: tuple[str, ...]
    compute: str
    drew: tuple[str, ...] = ()
    drawn: bool = False

    @property
    def roundoff(self) -> float:
        """Unit roundoff of the coarsest type of its numbers."""
        return max(_ROUNDOFF.get(each, 2.0**-24) for each in (*self.types, self.compute))


_ROUNDOFF = {"torch.bfloat16": 2.0**-8, "torch.float16": 2.0**-11, "torch.float64": 2.0**-53}


class NotRecordedError(RunError):
    """A training has left no record that can be compared."""


def read_side(directory: Path, name: str) -> Recording:
    """Read a recorded training with a name for messages; NotRecordedError if none is complete."""
    folder = directory / FOLDER
    by_step: dict[int, list[RankStep]] = {}
    for file in sorted(folder.glob("rank-*/step-*.bin")):
        try:
            step = RankStep.unpack(read_file(file, _MOST_BYTES))
        except (OSError, PackedError) as error:
            raise NotRecordedError(f"{file} cannot be read: {error}") from error
        failed = step.facts.get("failed")
        if failed:
            raise NotRecordedError(f"rank {step.rank} of {name} could not be recorded: {failed}")
        by_step.setdefault(step.step, []).append(step)
    if not by_step:
        raise NotRecordedError(
            f"{name} has recorded no step: it called no optimizer after a forward pass of its model"
        )
    first = by_step[min(by_step)][0].facts
    try:
        world = int(first["world"])
        whole = {number: parts for number, parts in by_step.items() if len(parts) == world}
        steps = {number: _together(parts) for number, parts in sorted(whole.items())}
        shapes = {
            str(n): tuple(map(int, shape))
            for part in by_step[min(by_step)]
            for n, shape in part.facts["shapes"].items()
        }
        facts = [part.facts for parts in whole.values() for part in parts]
        return Recording(
            name,
            steps,
            shapes,
            world,
            len(first["data_ranks"]),
            int(first["passes"]),
            tuple(map(str, first["types"])),
            max(
                (str(f["compute"]) for f in facts), key=lambda t: _ROUNDOFF.get(t, 0.0), default=""
            ),
            tuple(dict.fromkeys(str(one) for f in facts for one in f["drew"])),
            any(f["drawn"] for f in facts),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise NotRecordedError(f"{folder} holds no record that can be read ({error!r})") from error


def _together(parts: Iterable[RankStep]) -> SideStep:
    """Return a step of all ranks."""
    ranks = sorted(parts, key=lambda part: part.rank)
    first = ranks[0]
    data = set(first.facts["data_ranks"])
    workers = [part for part in ranks if part.rank in data] or [first]
    found = SideStep(facts=first.facts)
    for kind in dict.fromkeys(kind for part in ranks for kind in part.figures):
        _add(kind, ranks, found)
    found.samples = np.concatenate([part.samples for part in workers])
    found.sample_ranks = np.concatenate(
        [np.full(len(part.samples), part.rank, np.int64) for part in workers]
    )
    labels = [part.facts["labels"] for part in workers]
    if all(one is not None for one in labels):
        digest = sum(int(one[1]) for one in labels) & ((1 << 62) - 1)
        found.labels = (sum(int(one[0]) for one in labels), digest)
    for name in ("losses", "weights", "multipliers"):
        setattr(found, name, np.concatenate([getattr(part, name) for part in workers]))
    for part in ranks:
        found.counters |= {str(n): float(c) for n, c in part.facts["counters"].items()}
        found.random[part.rank] = part.facts.get("random", {})
    return found


def _add(kind: str, ranks: Iterable[RankStep], found: SideStep) -> None:
    """Add up the parts of all tensors of a kind; each part counts once."""
    known: dict[tuple[str, str], Whole] = {}
    differ: dict[str, tuple[list[int], float]] = {}
    for part in ranks:
        figures = part.figures.get(kind)
        if figures is None:
            continue
        for row, key in enumerate(zip(figures.names, figures.places, strict=True)):
            own = Whole(figures.squares_PQ[row], figures.sketches_PQK[row].astype(np.float64))
            copy = known.setdefault(key, own)
            if copy is own:
                continue
            distance = float(np.linalg.norm(copy.sketches_QK - own.sketches_QK))
            if not distance <= _SAME_COPY * max(copy.norm, own.norm):
                ranks_, largest = differ.setdefault(key[0], ([], 0.0))
                ranks_.append(part.rank)
                norm = max(copy.norm, own.norm) or 1.0
                differ[key[0]] = (ranks_, max(largest, distance / norm))
    wholes: dict[str, Whole] = {}
    for (name, _), own in known.items():
        before = wholes.get(name)
        wholes[name] = own if before is None else Whole(
            before.squares_Q + own.squares_Q, before.sketches_QK + own.sketches_QK
        )  # fmt: skip
    found.figures[kind] = wholes
    found.unequal += [
        Unequal(kind, name, tuple(dict.fromkeys(of)), largest)
        for name, (of, largest) in differ.items()
    ]


def part_of(side: Recording, first: int, stop: int) -> Recording:
    """Return the steps ``[first, stop)`` of a side."""
    return replace(side, steps={n: s for n, s in side.steps.items() if first <= n < stop})


def joined(whole: Recording, resumed: Recording, at: int) -> tuple[Recording, Recording]:
    """Return both sides from step ``at`` on, the first one of the resumed training.

    What the whole training's optimizer held after the step before stands as what it held before the
    first one, to be compared with the resumed one's.
    """
    later = part_of(whole, at, max(whole.steps) + 1)
    before = whole.steps[at - 1]
    moments = {
        HELD + kind.removeprefix(MOMENT): figures
        for kind, figures in before.figures.items()
        if kind.startswith(MOMENT)
    }
    first = later.steps[at]
    held = replace(
        first,
        figures={**first.figures, **moments},
        facts={**first.facts, "held counters": dict(before.counters), "resumed": True},
    )
    held.facts = {**first_facts(whole), **first_facts(resumed), **held.facts}
    return replace(later, steps={**later.steps, at: held}), resumed


def first_facts(side: Recording) -> Mapping[str, object]:
    """Return what is recorded in a side's first step alone."""
    facts = side.steps[min(side.steps)].facts
    return {name: facts[name] for name in ("trained", "shapes", "types") if name in facts}

"""The files of all ranks of a recorded training put together, and what rounding may explain.

A resumed training stands beside one that went on: what it starts with is what the other one held.
Legend of shapes: Q parts of a tensor by position; k numbers in a sketch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.bus.parity import (
    BUFFER,
    FOLDER,
    GRADIENT,
    HELD,
    MOMENT,
    OUTPUT,
    OUTPUT_GRADIENT,
    QUARTERS,
    START,
    UNCLIPPED,
    UPDATE,
    WIDTH,
    RankStep,
    TensorFigures,
)
from rankscope.bus.words import dtype_name
from rankscope.errors import RunError
from rankscope.files import read_file
from rankscope.stats.arrays import Floats, Ints
from rankscope.stats.rounding import UNIT_ROUNDOFF

_MOST_BYTES = 1 << 31
_SAME_COPY = 1e-5
_SINGLE = UNIT_ROUNDOFF["float32"]


@dataclass(frozen=True, slots=True)
class Whole:
    """Sums of squares and linear sketches of one whole tensor."""

    squares_Q: Floats
    sketches_QK: Floats

    @property
    def norm(self) -> float:
        """Its norm."""
        return float(np.sqrt(self.squares_Q.sum()))

    def times(self, factor: float) -> "Whole":
        """Return the figures of a multiple of the tensor."""
        return Whole(factor**2 * self.squares_Q, factor * self.sketches_QK)


@dataclass(frozen=True, slots=True)
class Unequal:
    """Copies of a tensor on ``ranks`` that differ from the first one, by ``relative`` at most."""

    kind: str
    name: str
    ranks: tuple[int, ...]
    relative: float


@dataclass(slots=True)
class SideStep:
    """One step of a training, of all its ranks.

    ``figures`` are by kind and name; ``samples`` are the identities of the global batch, each as
    often as it was drawn, on the ranks ``sample_ranks``; ``labels`` are number and digest of the
    label tokens (None if unknown), ``elements`` those of each of the model's inputs; ``losses`` are
    of micro-batches and samples, with their label tokens ``weights`` (NaN if unknown);
    ``multipliers`` lie between losses and what ``backward`` was called on; ``counters`` are the
    optimizer's by parameter; ``facts`` are those of the first rank; ``random`` holds digests of the
    generators, by rank.
    """

    figures: dict[str, dict[str, Whole]] = field(default_factory=dict)
    unequal: list[Unequal] = field(default_factory=list)
    samples: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    sample_ranks: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    labels: tuple[int, int] | None = None
    elements: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    losses: Floats = field(default_factory=lambda: np.empty(0))
    weights: Floats = field(default_factory=lambda: np.empty(0))
    multipliers: Floats = field(default_factory=lambda: np.empty(0))
    counters: dict[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    random: dict[int, Mapping[str, str]] = field(default_factory=dict)
    workers: int = 1

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
        return max(map(_roundoff_of, (*self.types, self.compute)))


def trained(side: Recording) -> set[str]:
    """Return the names of the trained parameters."""
    first = side.steps[min(side.steps)] if side.steps else SideStep()
    return set(map(str, first.facts.get("trained", ())))


def _roundoff_of(dtype: str) -> float:
    return UNIT_ROUNDOFF.get(dtype_name(dtype), _SINGLE)


class NotRecordedError(RunError):
    """A training has left no record that can be compared."""


def read_side(directory: Path, name: str) -> Recording:
    """Read a recorded training with a name for messages; NotRecordedError if none is complete."""
    folder = directory / FOLDER
    by_step: dict[int, list[RankStep]] = {}
    for file in sorted(folder.glob("rank-*/step-*.bin")):
        try:
            step = RankStep.unpack(read_file(file, _MOST_BYTES))
        except (OSError, ValueError) as error:  # not there, or damaged
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
            steps[min(steps)].workers if steps else 1,
            int(first["passes"]),
            tuple(map(str, first["types"])),
            max((str(f["compute"]) for f in facts), key=_roundoff_of, default=""),
            tuple(dict.fromkeys(str(one) for f in facts for one in f["drew"])),
            any(f["drawn"] for f in facts),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise NotRecordedError(f"{folder} holds no record that can be read ({error!r})") from error


def _together(parts: Iterable[RankStep]) -> SideStep:
    """Return a step of all ranks.

    Under pipeline parallelism the first stage has the samples, and the last one has the losses.
    """
    ranks = sorted(parts, key=lambda part: part.rank)
    trained = dict.fromkeys(n for part in ranks for n in part.facts.get("trained", ()))
    workers = with_loss = _workers_of(ranks)
    if any(part.facts.get("fed") for part in ranks):
        workers = _workers_of([part for part in ranks if not part.facts.get("fed")] or ranks)
        with_loss = _workers_of([part for part in ranks if len(part.losses)] or ranks)
    of_all: dict[str, Any] = {"trained": list(trained)} if trained else {}  # of the first step
    of_all["norm rounding"] = max(float(p.facts.get("norm rounding", 0)) for p in ranks)
    found = SideStep(facts={**ranks[0].facts, **of_all}, workers=len(workers))
    kinds = dict.fromkeys(kind for part in ranks for kind in part.figures)
    for kind in kinds:
        if kind not in (OUTPUT, OUTPUT_GRADIENT):
            _add(kind, ranks, found)
    if OUTPUT in kinds:
        _add_outputs(ranks, found)
    found.samples = np.concatenate([part.samples for part in workers])
    found.sample_ranks = np.concatenate(
        [np.full(len(part.samples), part.rank, np.int64) for part in workers]
    )
    labels = [part.facts["labels"] for part in with_loss]
    if all(one is not None for one in labels):
        found.labels = _summed(labels)
    elements = [part.facts.get("elements", {}) for part in workers]
    names = {name for each in elements for name in each}
    found.elements = {
        str(name): _summed([each[name] for each in elements if name in each]) for name in names
    }
    for name in ("losses", "weights", "multipliers"):
        setattr(found, name, np.concatenate([getattr(part, name) for part in with_loss]))
    for part in ranks:
        found.counters |= {str(n): float(c) for n, c in part.facts["counters"].items()}
        found.random[part.rank] = part.facts.get("random", {})
    return found


def _summed(parts: Iterable[Sequence[Any]]) -> tuple[int, int]:
    """Return number and digest of what several ranks have."""
    numbers, digests = zip(*parts, strict=True)
    return sum(map(int, numbers)), sum(map(int, digests)) & ((1 << 62) - 1)


def _workers_of(ranks: Sequence[RankStep]) -> list[RankStep]:
    """Return one rank of each worker: those that reduce together, and others with other samples."""
    together = set(ranks[0].facts["data_ranks"])
    workers = [part for part in ranks if part.rank in together]
    seen = {_order_free(part) for part in workers}
    for part in ranks:
        if part.rank not in together and len(part.samples) and _order_free(part) not in seen:
            workers.append(part)
            seen.add(_order_free(part))
    return workers or [ranks[0]]


def _order_free(part: RankStep) -> bytes:
    return np.sort(part.samples).tobytes()


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


def _add_outputs(ranks: Sequence[RankStep], found: SideStep) -> None:
    """Add up what layers return over the workers, and take the mean of its gradients."""
    in_order = sorted(ranks, key=lambda part: bool(part.facts.get("fed")))
    shapes: dict[str, tuple[int, ...]] = {}
    for name in dict.fromkeys(name for part in in_order for name in part.facts["outputs"]):
        with_it = _workers_of([part for part in ranks if name in part.facts["outputs"]])
        of_all = {tuple(part.facts["outputs"][name]) for part in with_it}
        shapes[name] = of_all.pop() if len(of_all) == 1 else ()
        for kind, divisor in ((OUTPUT, 1), (OUTPUT_GRADIENT, found.workers)):
            figures = [part.figures.get(kind, TensorFigures()) for part in with_it]
            rows = [each.names.index(name) if name in each.names else -1 for each in figures]
            if min(rows) >= 0:
                pairs = list(zip(figures, rows, strict=True))
                sketch = np.add.reduce(
                    [each.sketches_PQK[row].astype(float) for each, row in pairs]
                )
                whole = Whole(np.square(sketch).sum(axis=1), sketch).times(1 / divisor)
                found.figures.setdefault(kind, {})[name] = whole
    found.facts = {**found.facts, "outputs": shapes}


def part_of(side: Recording, first: int, stop: int) -> Recording:
    """Return the steps ``[first, stop)`` of a side."""
    return replace(side, steps={n: s for n, s in side.steps.items() if first <= n < stop})


def joined(whole: Recording, resumed: Recording, at: int) -> tuple[Recording, Recording]:
    """Return both sides of a resumption at step ``at``, the first one of the resumed training.

    What the whole training's optimizer held after the step before stands as what it held before the
    first one, to be compared with the resumed one's.
    """
    before = whole.steps[at - 1]
    moments = {
        HELD + kind.removeprefix(MOMENT): figures
        for kind, figures in before.figures.items()
        if kind.startswith(MOMENT)
    }
    first = whole.steps[at]
    held = replace(
        first,
        figures={**first.figures, **moments},
        facts={**first.facts, "held counters": dict(before.counters), "resumed": True},
    )
    return replace(whole, steps={**whole.steps, at: held}), resumed


_TIMES = 4.0  # most by which another layout's rounding exceeds the perturbation's change

_SKETCH = 2e-6  # relative rounding of the sketch of a small tensor, which adds in float32

_OF_LOSS = 16.0
_OF_FACTOR = 4.0
_FEW = 4
_ALONG = 0.8


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far two sides may be apart by rounding alone: by theory, and as one run has shown.

    A perturbation run is one of the two trainings again, with a quarter of its parameters' elements
    moved by one unit in the last place before the first step. What it changes in a figure, another
    order of summation may change as well; later steps grow apart as they do in that run. ``moved``
    is the perturbation run of the side ``original``, if there is one.
    """

    a: Recording
    b: Recording
    original: Recording | None = None
    moved: Recording | None = None
    _cached: dict[tuple[int, str], tuple[dict[str, float], float]] = field(default_factory=dict)
    _factors: dict[tuple[int, str], tuple[dict[str, float], float]] = field(default_factory=dict)
    _grown: dict[int, float] = field(default_factory=dict)

    @property
    def steps(self) -> list[int]:
        """The steps that both sides have, in order."""
        return sorted(set(self.a.steps) & set(self.b.steps))

    @property
    def roundoff(self) -> float:
        """Unit roundoff of the coarser side."""
        return max(self.a.roundoff, self.b.roundoff)

    @property
    def terms(self) -> float:
        """Roundings of a sum over micro-batches and workers, relative to its result.

        ``(M + W + 4)`` roundings, of terms whose norms together are up to ``sqrt(M W)`` times the
        norm of their mean where they are independent of each other.
        """
        return max(
            (s.passes + s.workers + 4) * math.sqrt(s.passes * s.workers) for s in (self.a, self.b)
        )

    def of_start(self, name: str, norm: float) -> float:
        """Return the distance of equal starts: that of a change of type."""
        rounded = 1.5 * self.roundoff if set(self.a.types) != set(self.b.types) else 0.0
        return (self._of_sketch(name) + rounded) * norm

    def of(self, step: int, kind: str, name: str, first: Whole, second: Whole) -> float:
        """Return the distance of one tensor's figures up to which rounding explains it."""
        norm = max(first.norm, second.norm)
        if kind in (START, BUFFER) and self.moved is None:
            return self.of_start(name, norm)
        change, relative = self._changes(step, kind)
        bound = (self._of_sketch(name) + self.roundoff * self.terms) * norm
        bound += _TIMES * max(change.get(name, 0.0), relative * norm) * self._growth(step)
        if kind in (GRADIENT, UPDATE) or kind.startswith(MOMENT):
            bound += self._of_clipping(step) * norm
        if kind == UPDATE:
            bound += self._of_stored(step, name)
        return bound

    def _of_sketch(self, name: str) -> float:
        """Return the rounding of a tensor's sketch, relative to its norm.

        Each of its numbers adds up elements one by one: the roundings are a random walk.
        """
        size = math.prod(self.a.shapes.get(name, (1,)))
        return max(_SKETCH, _SINGLE * math.sqrt(size / (QUARTERS * WIDTH)))

    def of_factor(self, step: int, kind: str, name: str) -> float:
        """Return how far from 1 the factor between two tensors may be by rounding.

        Where rounding is large, it changes a tensor's direction much more than its length, so a
        factor is seen that is small beside the distance. Infinity without a perturbation run.
        """
        key = (step, kind)
        if key not in self._factors:
            pair = self._perturbed(step)
            if pair is None:
                return math.inf
            own, other = (each.figures.get(kind, {}) for each in pair)
            known = {n: abs(factor(one, other[n]) - 1) for n, one in own.items() if n in other}
            finite = sorted(value for value in known.values() if math.isfinite(value))
            usual = finite[len(finite) * 3 // 4] if finite else math.inf
            self._factors[key] = known, usual
        changes, usual = self._factors[key]
        own_change = changes.get(name, math.inf)
        bound = _OF_FACTOR * self.roundoff + _TIMES * max(own_change, usual) * self._growth(step)
        bound += self._of_clipping(step)
        if kind == UPDATE and set(self.a.types) != set(self.b.types):
            norms = [s.steps[step].figures[kind][name].norm for s in (self.a, self.b)
                     if name in s.steps[step].figures.get(kind, {})]  # fmt: skip
            bound += self._of_stored(step, name) / max(norms)
        return bound

    def of_loss(self, step: int, first: float, second: float) -> float:
        """Return the difference of two losses up to which rounding explains it."""
        bound = (_SKETCH + _OF_LOSS * self.roundoff) * max(abs(first), abs(second))
        pair = self._perturbed(step)
        if pair is not None:
            change = abs(pair[0].loss - pair[1].loss) * self._growth(step)
            bound += _TIMES * change if math.isfinite(change) else 0.0
        return bound

    def _of_clipping(self, step: int) -> float:
        """Return how far apart the sides' factors of clipping may be by rounding of their norms."""
        steps = self.a.steps[step], self.b.steps[step]
        return _TIMES * max(
            float(each.facts.get("norm rounding", 0)) if is_clipped(each) else 0.0 for each in steps
        )

    def _growth(self, step: int) -> float:
        """Return how much farther apart both sides begin a step than the perturbation run does.

        All that came before was found to be rounding: a sign of Adam's first update, say, where a
        gradient is almost zero.
        """
        if step == self.steps[0] or self.original is None or self.moved is None:
            return 1.0
        if step not in self._grown:
            pairs = ((self.a, self.b), (self.original, self.moved))
            steps = [(x.steps.get(step), y.steps.get(step)) for x, y in pairs]
            own, other = (
                math.inf if x is None or y is None else _distances(x, y, START)[1] for x, y in steps
            )
            grown = own / other if 0 < other < math.inf and math.isfinite(own) else 1.0
            self._grown[step] = max(grown, 1.0)
        return self._grown[step]

    def _of_stored(self, step: int, name: str) -> float:
        """Return how much of an update the type of the parameters may round away."""
        sizes = []
        for side in (self.a, self.b):
            coarse = max(map(_roundoff_of, side.types), default=0.0)
            coarse = coarse if coarse > _SINGLE else 0.0  # which rounds away little of an update
            whole = side.steps[step].figures.get(START, {}).get(name)
            sizes.append(coarse * whole.norm if whole is not None else 0.0)
        return max(sizes)

    def _changes(self, step: int, kind: str) -> tuple[dict[str, float], float]:
        """Return what the perturbation changed in each tensor, and in all, over their norm."""
        key = (step, kind)
        if key not in self._cached:
            pair = self._perturbed(step)
            self._cached[key] = ({}, 0.0) if pair is None else _distances(*pair, kind)
        return self._cached[key]

    def _perturbed(self, step: int) -> tuple[SideStep, SideStep] | None:
        """Return a step of the side that was run again, and of the perturbation run."""
        if self.original is None or self.moved is None:
            return None
        own = self.original.steps.get(step)
        other = self.moved.steps.get(step)
        return None if own is None or other is None else (own, other)


def _distances(first: SideStep, second: SideStep, kind: str) -> tuple[dict[str, float], float]:
    before = first.figures.get(kind, {})
    after = second.figures.get(kind, {})
    change = {name: distance(one, after[name]) for name, one in before.items() if name in after}
    total = math.sqrt(sum(one.norm**2 for one in before.values()))
    apart = math.sqrt(sum(value**2 for value in change.values()))
    shares = sorted(change[name] / one.norm for name, one in before.items()
                    if name in change and one.norm > 0)  # fmt: skip
    usual = shares[len(shares) * 3 // 4] if shares else 0.0
    return change, max(apart / total if total > 0 else 0.0, usual)


def distance(first: Whole, second: Whole) -> float:
    """Return the distance of two tensors as their sketches show it: RMS error 9 % of itself."""
    return float(np.linalg.norm(first.sketches_QK - second.sketches_QK))


def factor(first: Whole, second: Whole) -> float:
    """Return the second over the first, along its direction; NaN if that is zero.

    The few numbers of the sketches that differ most do not count: see :func:`spread_distance`.
    """
    own = first.sketches_QK.reshape(-1)
    other = second.sketches_QK.reshape(-1)
    kept = np.argsort(np.abs(own - other))[: len(own) - _FEW]
    square = float(np.square(own[kept]).sum())
    return float((own[kept] * other[kept]).sum()) / square if square else math.nan


def is_clipped(step: SideStep) -> bool:
    """Return whether most gradients became shorter between backward pass and optimizer."""
    if step.facts.get("clipping seen"):
        return True
    before = step.figures.get(UNCLIPPED, {})
    after = step.figures.get(GRADIENT, {})
    names = [name for name in before if name in after and before[name].norm > 0]
    shorter = [name for name in names if _is_shorter(before[name], after[name])]
    return len(shorter) > len(names) / 2


def _is_shorter(before: Whole, after: Whole) -> bool:
    """Return whether a tensor was made shorter in about the same direction."""
    if not 0 < after.norm < 0.999 * before.norm:
        return False
    product = float((before.sketches_QK * after.sketches_QK).sum())
    return product > _ALONG * before.norm * after.norm


def spread_distance(first: Whole, second: Whole, size: int) -> float:
    """Return the distance of two updates without a few elements.

    An update of Adam has the sign of an element of the gradient: where that is zero but for
    rounding, two layouts go opposite ways. One element is in one number of a sketch, so the largest
    numbers of the difference are left out, of tensors with many elements (``size``).
    """
    apart = np.sort(np.square(first.sketches_QK - second.sketches_QK), axis=None)
    few = 0 if size < _FEW * _FEW else _FEW
    return float(np.sqrt(apart[: len(apart) - few].sum()))


def identical(a: Recording, b: Recording) -> bool:
    """Return whether two sides have the same figures, bit for bit, in the steps of both."""
    steps = [(a.steps[n], b.steps[n]) for n in sorted(set(a.steps) & set(b.steps))]
    return bool(steps) and all(_same(first, second) for first, second in steps)


def _same(a: SideStep, b: SideStep) -> bool:
    if set(a.figures) != set(b.figures) or a.counters != b.counters:
        return False
    return all(
        set(a.figures[kind]) == set(b.figures[kind])
        and all(distance(one, b.figures[kind][name]) == 0 for name, one in a.figures[kind].items())
        for kind in a.figures
    )

"""Two runs read for the comparison: each alone, their common steps, and settings that differ.

T steps, W workers, G groups, N tensors.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope import Run
from rankscope.bus.environment import (
    KERNEL_FLAGS,
    TYPE_FLAGS,
    is_compared,
    precision_digest,
)
from rankscope.errors import RunError
from rankscope.stats.arrays import MISSING_INT, Floats, Ints
from rankscope.stats.rounding import UNIT_ROUNDOFF
from rankscope.tools.diff.result import Alignment, Change

_TRACED = ("step", "kind", "name", "digest", "norm", "sketch")

MIN_MATCHED = 0.9  # of the compared steps whose batches agree before another offset is believed

MAX_VOTES = 1 << 20  # pairs of equal batches that are counted; the most frequent are left out first

SAME_LOSS = 1e-5  # relative distance up to which two losses may be those of the same parameters


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of one kind in one step by sorted name: digests, L2 norms, linear sketches."""

    names: tuple[str, ...]
    digests_N: Ints
    norms_N: Floats
    sketches_NK: Floats


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Where a run's workers first differ in what is alike; ``ranks`` differ from most."""

    step: int
    kind: str
    name: str
    ranks: tuple[int, ...]


_BEGUN_WITH = "optimizer: parameters: bits"


class DiffSide:
    """One of the two runs; RunError if a file is damaged, or the run has no step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.info = run.info
        self.name = str(run.path)
        self.steps_T = run.per_worker("loss")[0]
        if not len(self.steps_T):
            raise RunError(
                f"{run.path} has no recorded step: there is nothing to compare; wait until the "
                "run has written its first steps, or check the path"
            )
        self._columns: dict[str, NDArray[Any]] = {}
        self.num_workers = self.column("loss").shape[1]

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of the workers ``[T, W]``: NaN, MISSING_INT or False where null."""
        if name not in self._columns:
            self._columns[name] = self.run.matrix(name)
        return self._columns[name]

    @cached_property
    def samples(self) -> dict[int, dict[int, Ints]]:
        """Samples by step and rank, as far as they are recorded."""
        columns = self.run.columns("samples", "step", "rank", "samples")
        found: dict[int, dict[int, Ints]] = {}
        for step, rank, ids in zip(*columns.values(), strict=True):
            found.setdefault(int(step), {})[int(rank)] = ids
        return found

    @cached_property
    def batches(self) -> dict[int, bytes]:
        """The multiset of samples of each step's global batch, as one key."""
        return {
            step: np.sort(np.concatenate(list(ranks.values()))).tobytes()
            for step, ranks in self.samples.items()
        }

    @cached_property
    def groups(self) -> dict[str, Floats]:
        """Local gradient norms of each group ``[T, W]``, NaN where not measured."""
        columns = self.run.columns("groups", "step", "rank", "group", "grad_norm")
        norms: dict[str, Floats] = {}
        names, which = np.unique(columns["group"].astype(str), return_inverse=True)
        known = np.isin(columns["step"], self.steps_T)
        at = np.searchsorted(self.steps_T, columns["step"])
        for index, name in enumerate(names):
            rows = (which == index) & known
            matrix = np.full((len(self.steps_T), self.num_workers), np.nan)
            matrix[at[rows], columns["rank"][rows]] = columns["grad_norm"][rows]
            norms[str(name)] = matrix
        return norms

    def per_step(self, name: str) -> Floats:
        """Return a float column of the steps table ``[T]``, NaN where it has no row."""
        columns = self.run.columns("steps", "step", name)
        values = dict(zip(columns["step"].tolist(), columns[name].tolist(), strict=True))
        return np.array([values.get(int(step), np.nan) for step in self.steps_T])

    @cached_property
    def traces(self) -> dict[tuple[int, str], Tensors]:
        """Traced tensors by step and kind; empty when the run has no traces."""
        columns = self.run.columns("traces", *_TRACED)
        if not len(columns["step"]):
            return {}
        names = columns["name"].astype(str)
        kinds = columns["kind"].astype(str)
        steps = columns["step"]
        width = max(len(cell) for cell in columns["sketch"])
        sketches_NK = np.full((len(columns["step"]), width), np.nan)
        for row, cell in enumerate(columns["sketch"]):
            sketches_NK[row, : len(cell)] = cell
        order = np.lexsort((names, kinds, steps))
        changes = (np.diff(steps[order]) != 0) | (kinds[order][1:] != kinds[order][:-1])
        found = {}
        for rows in np.split(order, np.flatnonzero(changes) + 1):
            found[int(steps[rows[0]]), str(kinds[rows[0]])] = Tensors(
                tuple(names[rows].tolist()),
                columns["digest"][rows],
                columns["norm"][rows],
                sketches_NK[rows],
            )
        return found

    @cached_property
    def begun_with(self) -> dict[int, int]:
        """Digests of the parameters before the first update, by rank; empty where not read."""
        columns = self.run.columns("digests", "step", "rank", "kind", "name", "digest")
        first = (columns["kind"].astype(str) == "started") & (columns["step"] == self.steps_T[0])
        rows = np.flatnonzero(first & (columns["name"].astype(str) == _BEGUN_WITH))
        return dict(
            zip(columns["rank"][rows].tolist(), columns["digest"][rows].tolist(), strict=True)
        )

    @cached_property
    def disagreement(self) -> Disagreement | None:
        """Where the run's own workers first differ in parameters, optimizer or gradients."""
        columns = self.run.columns("digests", "step", "rank", "kind", "name", "digest")
        kinds = columns["kind"].astype(str)
        rows = np.flatnonzero(np.isin(kinds, ("parameter", "optimizer", "reduced", "applied")))
        if not len(rows):
            return None
        step = int(columns["step"][rows].min())
        rows = rows[columns["step"][rows] == step]
        order = ("reduced", "applied", "parameter", "optimizer")
        first = min(rows, key=lambda row: (order.index(kinds[row]), str(columns["name"][row])))
        kind = str(kinds[first])
        name = str(columns["name"][first])
        same = rows[(kinds[rows] == kind) & (columns["name"][rows].astype(str) == name)]
        digests = columns["digest"][same]
        values, counts = np.unique(digests, return_counts=True)
        odd = digests != values[counts.argmax()]
        ranks = tuple(int(rank) for rank in columns["rank"][same][odd])
        return Disagreement(step, kind, name, ranks)

    def weighted_loss(self) -> Floats:
        """Return the global batch's loss ``[T]``, weighted by label tokens where known."""
        losses = self.column("loss")
        weights = self.column("loss_weight")
        known = (weights > 0).all(axis=1, keepdims=True)
        weights = np.where(known, weights, 1.0)
        return np.asarray((losses * weights).sum(axis=1) / weights.sum(axis=1), np.float64)


def align(a: DiffSide, b: DiffSide, given: int | None = None) -> Alignment:
    """Return which steps of two runs are compared; ``given`` is a known offset of A to B.

    Steps of equal number are, unless batches prove another offset: a run that continues another may
    count on from another number, and one that starts in the middle of another counts from 0.
    Another offset needs the same global batch in 90 % of the steps, and either a run that is known
    to continue another, or equal losses where they begin. RunError without a common step.
    """
    plain = _overlap(a, b, 0)
    offset = given or 0
    by_samples = False
    matched = _matched(a, b, offset)
    hits_plain = matched * len(plain)
    if given is None and hits_plain < min(len(a.batches), len(b.batches)):
        best = _best_offset(a.batches, b.batches)
        hits = _matched(a, b, best) * len(_overlap(a, b, best))
        if best and hits > hits_plain and _believed(a, b, best):
            offset = best
            by_samples = True
    steps_a = _overlap(a, b, offset)
    if not len(steps_a):
        raise RunError(
            f"{a.name} (steps {a.steps_T[0]} to {a.steps_T[-1]}) and {b.name} (steps "
            f"{b.steps_T[0]} to {b.steps_T[-1]}) have no step in common: give two runs of the same "
            "training, or say with --offset at which step of the first the second begins"
        )
    return Alignment(
        steps_a,
        steps_a - offset,
        offset,
        (a.num_workers, b.num_workers),
        by_samples or (bool(a.batches) and bool(b.batches) and matched >= MIN_MATCHED),
        _words(a, b, offset, len(steps_a)),
    )


def dealt_otherwise(a: Mapping[int, Any], b: Mapping[int, Any]) -> dict[int, int] | None:
    """Return which worker of B has whose batch of A, where B's are A's in another order.

    By rank of B, the rank of A; only ranks that have another's. None when the batches are not those
    of A as wholes.
    """
    keys_a = {rank: np.sort(ids).tobytes() for rank, ids in a.items()}
    keys_b = {rank: np.sort(ids).tobytes() for rank, ids in b.items()}
    if Counter(keys_a.values()) != Counter(keys_b.values()):
        return None
    free = {rank: key for rank, key in keys_a.items() if keys_b.get(rank) != key}
    moved = {}
    for rank, key in keys_b.items():
        if keys_a.get(rank) != key:
            owner = next(other for other, theirs in free.items() if theirs == key)
            del free[owner]
            moved[rank] = owner
    return moved


def _overlap(a: DiffSide, b: DiffSide, offset: int) -> Any:
    return np.intersect1d(a.steps_T, b.steps_T + offset)


def _matched(a: DiffSide, b: DiffSide, offset: int) -> float:
    """Return the share of compared steps that have the same global batch."""
    steps = _overlap(a, b, offset)
    equal = [
        a.batches[int(step)] == b.batches[int(step) - offset]
        for step in steps
        if int(step) in a.batches and int(step) - offset in b.batches
    ]
    return float(np.mean(equal)) if equal else 0.0


def _best_offset(a: Mapping[int, bytes], b: Mapping[int, bytes]) -> int:
    """Return the offset at which most steps have the same batch; the least if tied, 0 if none has.

    Batches that return (later epochs) vote for several offsets; the common one wins. The rarest
    vote first, as long as there are no more than ``MAX_VOTES``.
    """
    where_a = _steps_of(a)
    where_b = _steps_of(b)
    pairs = sorted(
        ((where_a[key], steps_b) for key, steps_b in where_b.items() if key in where_a),
        key=lambda pair: len(pair[0]) * len(pair[1]),
    )
    votes: Counter[int] = Counter()
    left = MAX_VOTES
    for steps_a, steps_b in pairs:
        left -= len(steps_a) * len(steps_b)
        if left < 0:
            break
        votes.update(step_a - step_b for step_b in steps_b for step_a in steps_a)
    return max(votes, key=lambda offset: (votes[offset], -abs(offset)), default=0)


def _steps_of(batches: Mapping[int, bytes]) -> dict[bytes, list[int]]:
    steps: dict[bytes, list[int]] = {}
    for step, key in batches.items():
        steps.setdefault(key, []).append(step)
    return steps


def _believed(a: DiffSide, b: DiffSide, offset: int) -> bool:
    steps = _overlap(a, b, offset)
    if _matched(a, b, offset) < MIN_MATCHED:
        return False
    if any("continues" in side.info for side in (a, b)):
        return True
    if not len(_overlap(a, b, 0)):
        return True
    first = int(steps[0])
    one = a.weighted_loss()[np.searchsorted(a.steps_T, first)]
    other = b.weighted_loss()[np.searchsorted(b.steps_T, first - offset)]
    return bool(abs(one - other) <= SAME_LOSS * abs(one))


def _words(a: DiffSide, b: DiffSide, offset: int, count: int) -> str:
    words = f"{count:,} steps compared"
    if offset:
        words += f"; by their batches, step s of B is step s {offset:+d} of A"
    for name, side in (("A", a), ("B", b)):
        extra = len(side.steps_T) - count
        if extra > 0:
            words += f"; {extra:,} more in {name} only"
    if a.num_workers != b.num_workers:
        words += f"; {a.num_workers} workers in A, {b.num_workers} in B"
    return words


# What differs in their settings ------------------------------------------------------------------

_PLACES = re.compile(
    r"(^|[._])(run_?dir|output\w*|path|dir|directory|name|id|time|date|log\w*|resume\w*)$"
)
_SEED = re.compile(r"(^|[._-])seeds?($|[._-])")
_TYPE = re.compile(r"(dtype|precision|autocast|bf16|fp16|\bamp\b|parameters\.types|\.layout$)")
_LIKE_TYPE = re.compile(r"bfloat16|float16|float32|float64|bf16|fp16|fp32")
_OF_A_JOB = frozenset(
    {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
)
MAX_VALUE = 80
KINDS = ("dtype", "training", "reduction", "config", "seed", "loader", "environment", "monitor")
"""Kinds of settings, the decisive ones first."""
_HOOKS = {"bf16": "bfloat16", "fp16": "float16"}


def check_models(a: DiffSide, b: DiffSide) -> None:
    """Raise RunError when two models have other numbers of parameters, or no name in common."""
    one, other = (_nested(side.info, "training", "parameters") for side in (a, b))
    for name in ("tensors", "elements"):
        if name in one and name in other and one[name] != other[name]:
            raise RunError(
                f"{a.name} and {b.name} train other models ({one[name]:,} and {other[name]:,} "
                f"{name} of parameters): give two runs of the same model"
            )
    names = [{name for each in side.traces.values() for name in each.names} for side in (a, b)]
    groups = [set(_nested(side.info, "options").get("groups") or ()) for side in (a, b)]
    for what, (left, right) in (("parameter", names), ("group of parameters", groups)):
        if left and right and not left & right:
            raise RunError(
                f"{a.name} and {b.name} train other models: they have no {what} in common; give "
                "two runs of the same model"
            )


def _nested(info: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    found: Any = info
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def layouts_differ(a: DiffSide, b: DiffSide, at_a: int, at_b: int) -> bool:
    """Return whether two runs keep their tensors in known, different layouts."""
    one = a.column("state_layout")[at_a, 0]
    other = b.column("state_layout")[at_b, 0]
    return bool(one != other and MISSING_INT not in (one, other))


def types_of(side: DiffSide) -> list[str]:
    """Return the recorded types in which a run computes, keeps and adds up its gradients."""
    types = [str(name) for name in _nested(side.info, "training", "parameters", "types")]
    types += [str(name) for name in _nested(side.info, "options", "reduced_in").values()]
    hook = str(_nested(side.info, "training", "reduction").get("hook"))
    types += [dtype for word, dtype in _HOOKS.items() if word in hook]
    return [name for name in types if name in UNIT_ROUNDOFF] or ["float32"]


def changes_between(a: DiffSide, b: DiffSide) -> tuple[Change, ...]:
    """Return the settings and facts of ``run.json`` that differ, the decisive ones first."""
    found = []
    for part in ("training", "config", "options"):
        one = _flat(a.info.get(part), part)
        other = _flat(b.info.get(part), part)
        if not one or not other:
            continue  # an older record does not have it
        for name in sorted(one.keys() | other.keys()):
            left = one.get(name)
            right = other.get(name)
            if left != right and not _PLACES.search(name):
                found.append(Change(name, _short(left), _short(right), _kind(name, left, right)))
    if any(change.name.startswith("training.parameters.types") for change in found):
        found = [change for change in found if change.name != "training.parameters.layout"]
    found += _environment(a, b)
    return tuple(sorted(found, key=lambda change: KINDS.index(change.kind)))


@dataclass(frozen=True, slots=True)
class PrecisionChange:
    """What differs between the forward passes' precisions, and the types that each adds."""

    changes: tuple[Change, ...] = ()
    types: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


def precision_change(a: DiffSide, b: DiffSide, at_a: int, at_b: int) -> PrecisionChange:
    """Return the difference between the forward passes' precisions in a step.

    Settings that choose a kernel and no type are named with the environment. Where the settings are
    not those of the start, the type is unknown: then the coarsest one counts.
    """
    codes = [int(side.column("precision")[at, 0]) for side, at in ((a, at_a), (b, at_b))]
    if MISSING_INT in codes or codes[0] == codes[1]:
        return PrecisionChange()
    sides = [_precision_of(side, code) for side, code in zip((a, b), codes, strict=True)]
    one, other = sides
    if one is None or other is None:
        unknown = Change("precision of the forward pass", "one", "another", "dtype")
        return PrecisionChange((unknown,), ((), (_COARSEST,)))
    differing = [name for name in one if one[name] != other[name]]
    names = [name for name in differing if name not in KERNEL_FLAGS or name == "mkldnn_matmul"]
    changes = tuple(Change(name, one[name], other[name], "dtype") for name in names)
    coarse = (_COARSEST,) if any(name in _FLAGS for name in names) else ()
    first, second = (
        tuple(each["autocast"] for _ in (0,) if each["autocast"] in UNIT_ROUNDOFF) + coarse
        for each in (one, other)
    )
    return PrecisionChange(changes, (first, second))


_FLAGS = (*TYPE_FLAGS, *KERNEL_FLAGS)
_COARSEST = "bfloat16"
_AUTOCASTS = ("off", "bfloat16", "float16")


def _precision_of(side: DiffSide, code: int) -> dict[str, Any] | None:
    """Return the settings behind a digest, if they are those of the start with some autocast."""
    facts = _facts_of(side)
    types = sorted(map(str, _nested(side.info, "training", "parameters", "types")))
    flags = {name: facts[name] for name in _FLAGS if name in facts}
    for autocast in _AUTOCASTS:
        settings = {"parameter_types": ", ".join(types), "autocast": autocast, **flags}
        if precision_digest(settings) == code:
            return settings
    return None


def _environment(a: DiffSide, b: DiffSide) -> list[Change]:
    one, other = (_facts_of(side) for side in (a, b))
    names = [n for n in sorted(one.keys() | other.keys()) if is_compared(n) and n not in _OF_A_JOB]
    return [
        Change(f"environment.{name}", _short(one.get(name)), _short(other.get(name)), "environment")
        for name in names
        if one.get(name) != other.get(name)
    ]


def _facts_of(side: DiffSide) -> dict[str, Any]:
    ranks = side.info.get("ranks")
    if not isinstance(ranks, list) or not ranks or not isinstance(ranks[0], Mapping):
        return {}
    facts = {name: ranks[0][name] for name in ("torch", "threads") if name in ranks[0]}
    environment = ranks[0].get("environment")
    return {**facts, **environment} if isinstance(environment, Mapping) else facts


def _flat(value: Any, name: str) -> dict[str, Any]:
    """Return nested settings by dotted name."""
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for key, item in value.items():
            found |= _flat(item, f"{name}.{key}")
        return found
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        found = {}
        for index, item in enumerate(value):
            found |= _flat(item, f"{name}.{index}")
        return found
    return {} if value is None and "." not in name else {name: value}


def _kind(name: str, left: Any, right: Any) -> str:
    if name.startswith("options.reduced_in"):
        return "dtype"
    if name.startswith("options."):
        return "monitor"
    if _SEED.search(name):
        return "seed"
    if name.startswith("training.loader"):
        return "loader"
    if _TYPE.search(name) or _LIKE_TYPE.search(f"{left} {right}"):
        return "dtype"
    if name.startswith("training.reduction"):
        return "reduction"
    return "training" if name.startswith("training.") else "config"


def _short(value: Any) -> Any:
    if isinstance(value, str | list):
        text = value if isinstance(value, str) else str(value)
        return text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 1] + "…"
    return value

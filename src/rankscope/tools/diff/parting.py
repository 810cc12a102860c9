"""Where two runs first part, by how much, how that grows and where it jumps. P pairs of steps."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.arrays import MISSING_INT, Bools, Floats
from rankscope.stats.rounding import UNIT_ROUNDOFF, predicted_error, ulp_distance
from rankscope.tools.diff.reading import DiffSide, Tensors
from rankscope.tools.diff.result import Alignment, Curve, DifferenceGrowth, Jump, Parting
from rankscope.tools.stages import Stage

COLUMNS = {
    Stage.RANDOM: (
        *("rng_digest", "rng_digest_python", "rng_digest_numpy"),
        *("rng_private", "loader_rng_torch", "loader_rng_python", "loader_rng_numpy"),
    ),
    Stage.SETTINGS: ("lr", "weight_decay", "rates_digest", "settings_digest", "optimizer_steps"),
    Stage.UPDATE: ("applied_digest", "param_digest", "optimizer_digest", "buffer_digest"),
}
"""Columns of the workers table by stage; each is compared by its type."""
BEFORE = ("parameter", "optimizer", "buffer")
_NEED_LAYOUT = {"reduced_digest", *COLUMNS[Stage.UPDATE]}
_OF_ALL_WORKERS = {"applied_digest", "param_digest", "optimizer_digest"}
"""Columns that rank 0 reports for all workers: comparable between other numbers of them."""

MEASURED_OTHERWISE = 1e-5  # relative, of two norms of one gradient added up in other parts


@dataclass(frozen=True, slots=True)
class ComparedColumn:
    """One signal of both runs.

    ``name`` is the column, or ``traces (reduced)``, ``traces (parameter)``. ``differs_PW``: where
    both know it and differ; one column for a signal without workers (``per_worker`` is false).
    ``relative_PW``: relative distance; NaN for digests.
    """

    stage: Stage
    name: str
    differs_PW: Bools
    relative_PW: Floats
    per_worker: bool = True


@dataclass(frozen=True, slots=True)
class TensorDistance:
    """Distance of the N tensors of one kind that both runs have, in one pair of steps.

    ``differs_N``: they differ in any bit. ``distance_N``: Euclidean, estimated from sketches.
    ``norms_N``: in run A. ``buckets_NK``: squared differences of the sketches, number by number.
    """

    names: tuple[str, ...]
    differs_N: Bools
    distance_N: Floats
    norms_N: Floats
    buckets_NK: Floats

    @property
    def total(self) -> float:
        """Relative distance of all tensors together."""
        norm = float(np.sqrt((self.norms_N**2).sum()))
        distance = float(np.sqrt((self.distance_N**2).sum()))
        if norm > 0:
            return distance / norm
        return 0.0 if distance == 0 else float("inf")

    def relative(self) -> dict[str, float]:
        """Return the relative distance of each tensor that differs, largest first."""
        with np.errstate(divide="ignore", invalid="ignore"):
            relative_N = self.distance_N / self.norms_N
        rows = np.flatnonzero(self.differs_N)
        key = np.nan_to_num(relative_N, nan=np.inf)
        rows = rows[np.argsort(-key[rows], kind="stable")]
        return {self.names[row]: float(relative_N[row]) for row in rows}


class Pair:
    """Two aligned runs, side by side; ``other_types``: their bits are not comparable."""

    def __init__(
        self, a: DiffSide, b: DiffSide, alignment: Alignment, *, other_types: bool
    ) -> None:
        self.a = a
        self.b = b
        self.alignment = alignment
        self.other_types = other_types
        self._at_a = np.searchsorted(a.steps_T, alignment.steps_a)
        self._at_b = np.searchsorted(b.steps_T, alignment.steps_b)
        self._distances: dict[tuple[int, str, int], TensorDistance | None] = {}

    def __len__(self) -> int:
        return len(self._at_a)

    def values(self, name: str) -> tuple[NDArray, NDArray]:  # type: ignore[type-arg]
        """Return a column of both runs ``[P, W]``; with other numbers of workers, rank 0's."""
        one = self.a.column(name)[self._at_a]
        other = self.b.column(name)[self._at_b]
        if not self.alignment.same_width:
            one = one[:, :1]
            other = other[:, :1]
        return one, other

    def losses(self) -> tuple[Floats, Floats]:
        """Return the losses of the workers ``[P, W]``; between other W, the global batch's."""
        if self.alignment.same_width:
            return self.values("loss")
        one = self.a.weighted_loss()
        other = self.b.weighted_loss()
        return one[self._at_a][:, None], other[self._at_b][:, None]

    def diverged(self) -> dict[str, Bools]:
        """Return by run in which steps its losses alone are infinite or not a number ``[P]``.

        A step whose loss is finite and whose gradients are not, as a gradient scaler skips it,
        does not count, nor does one in which the other run has no loss.
        """
        bad = []
        fine = []
        for side, at in ((self.a, self._at_a), (self.b, self._at_b)):
            finite_PW = np.isfinite(side.column("loss")[at])
            bad.append((side.column("nonfinite")[at] & ~finite_PW).any(axis=1))
            fine.append(finite_PW.any(axis=1) & ~bad[-1])
        return {"A": bad[0] & fine[1], "B": bad[1] & fine[0]}

    def divergence(self) -> tuple[int, str] | None:
        """Return the first pair in which one run alone has diverged, and which; None without."""
        firsts = [
            (int(np.flatnonzero(alone_P)[0]), run)
            for run, alone_P in self.diverged().items()
            if alone_P.any()
        ]
        return min(firsts, default=None)

    def steps_column(self, name: str) -> tuple[Floats, Floats]:
        """Return a column of the steps tables ``[P]``."""
        return self.a.per_step(name)[self._at_a], self.b.per_step(name)[self._at_b]

    def distance(self, pair: int, kind: str, *, back: int = 0) -> TensorDistance | None:
        """Return the distance of one kind of traced tensors, ``back`` steps before, if there."""
        if (pair, kind, back) not in self._distances:
            step_a = int(self.alignment.steps_a[pair]) - back
            step_b = int(self.alignment.steps_b[pair]) - back
            one = self.a.traces.get((step_a, kind))
            other = self.b.traces.get((step_b, kind))
            apart = None if one is None or other is None else self._apart(one, other)
            self._distances[pair, kind, back] = apart
        return self._distances[pair, kind, back]

    def update(self, pair: int) -> float:
        """Return the norm of a step's change of A's traced parameters; 0 if unknown."""
        step = int(self.alignment.steps_a[pair])
        before = self.a.traces.get((step - 1, "parameter"))
        after = self.a.traces.get((step, "parameter"))
        if before is None or after is None:
            return 0.0
        taken = self._apart(before, after)
        return 0.0 if taken is None else float(np.sqrt((taken.distance_N**2).sum()))

    def _apart(self, one: Tensors, other: Tensors) -> TensorDistance | None:
        names, rows_a, rows_b = np.intersect1d(one.names, other.names, return_indices=True)
        if not len(names) or one.sketches_NK.shape[1] != other.sketches_NK.shape[1]:
            return None
        with np.errstate(invalid="ignore", over="ignore"):
            apart_NK = one.sketches_NK[rows_a] - other.sketches_NK[rows_b]
            buckets_NK = apart_NK**2
        differs_N = one.digests_N[rows_a] != other.digests_N[rows_b]
        if self.other_types:
            differs_N = (buckets_NK != 0).any(axis=1)
        else:
            buckets_NK[~differs_N] = 0.0
        return TensorDistance(
            tuple(names.tolist()),
            differs_N,
            np.sqrt(buckets_NK.sum(axis=1)),
            one.norms_N[rows_a],
            buckets_NK,
        )

    def signals(self) -> list[ComparedColumn]:
        """Return all signals, in the order in which a step makes them known."""
        return [signal for signal in self._signals() if signal.differs_PW.size]

    def _signals(self) -> Iterator[ComparedColumn]:
        same = self.alignment.same_width
        yield self._data()
        if same:
            yield from (self._column(name, Stage.RANDOM) for name in COLUMNS[Stage.RANDOM])
        yield self._before()
        yield self._floats(Stage.LOSS, "loss", *self.losses())
        if same:
            yield self._column("nonfinite", Stage.LOSS)
            yield from self._local_gradients()
        else:
            yield self._only_one_diverged()
        yield from self._reduced()
        yield from (self._column(name, Stage.SETTINGS) for name in COLUMNS[Stage.SETTINGS])
        for name in COLUMNS[Stage.UPDATE]:
            if same or name in _OF_ALL_WORKERS:
                yield self._column(name, Stage.UPDATE)
        yield self._traced(Stage.UPDATE, "parameter")

    def _data(self) -> ComparedColumn:
        steps = zip(self.alignment.steps_a.tolist(), self.alignment.steps_b.tolist(), strict=True)
        one = self.a.samples
        other = self.b.samples
        width = self.a.num_workers if self.alignment.same_width else 1
        differs_PW = np.zeros((len(self), width), bool)
        digests = self._column("batch_digest", Stage.SAMPLES).differs_PW
        for pair, (step_a, step_b) in enumerate(steps):
            if step_a not in one or step_b not in other:
                if self.alignment.same_width:
                    differs_PW[pair] = digests[pair]
            elif not self.alignment.same_width:
                differs_PW[pair] = self.a.batches[step_a] != self.b.batches[step_b]
            else:
                for rank in range(width):
                    left = one[step_a].get(rank)
                    right = other[step_b].get(rank)
                    differs_PW[pair, rank] = (left is None) != (right is None) or (
                        left is not None and not np.array_equal(np.sort(left), np.sort(right))  # type: ignore[arg-type]
                    )
        unknown = np.full(differs_PW.shape, np.nan)
        per_worker = self.alignment.same_width
        return ComparedColumn(Stage.SAMPLES, "samples", differs_PW, unknown, per_worker)

    def _before(self) -> ComparedColumn:
        """Compare the models before the first pair; later, that is the step before."""
        differs_P1 = np.zeros((len(self), 1), bool)
        for kind in BEFORE:
            apart = self.distance(0, kind, back=1)
            differs_P1[0] |= apart is not None and bool(apart.differs_N.any())
        unknown = np.full(differs_P1.shape, np.nan)
        return ComparedColumn(Stage.START, "traces", differs_P1, unknown, per_worker=False)

    def _local_gradients(self) -> Iterator[ComparedColumn]:
        if self.a.info.get("options", {}).get("tier") != self.b.info.get("options", {}).get("tier"):
            return
        grouped = [
            (f"grad_norm of {group}", norms[self._at_a], self.b.groups[group][self._at_b])
            for group, norms in self.a.groups.items()
            if group in self.b.groups
        ]
        for name, one, other in [("grad_norm", *self.values("grad_norm")), *grouped]:
            signal = self._floats(Stage.LOCAL, name, one, other)
            yield self._unless_traced_equal(signal)

    def _reduced(self) -> Iterator[ComparedColumn]:
        yield self._traced(Stage.GRADIENT, "reduced")
        yield self._column("reduced_digest", Stage.GRADIENT)
        if self.alignment.same_width:
            norms = self.values("reduced_norm")
        else:
            one, other = self.steps_column("grad_norm_reduced")
            norms = one[:, None], other[:, None]
        signal = self._floats(Stage.GRADIENT, "reduced_norm", *norms)
        yield self._unless_traced_equal(signal)

    def _unless_traced_equal(self, signal: ComparedColumn) -> ComparedColumn:
        """Leave out differences of norms that were only added up in other parts.

        A norm is measured bucket by bucket: with other buckets it may have other last digits,
        though the traced gradients are equal to the bit.
        """
        equal_P = np.zeros(len(self), bool)
        for pair in np.flatnonzero(signal.differs_PW.any(axis=1)):
            apart = self.distance(int(pair), "reduced")
            equal_P[pair] = apart is not None and not apart.differs_N.any()
        small_PW = signal.relative_PW <= MEASURED_OTHERWISE
        differs_PW = signal.differs_PW & ~(equal_P[:, None] & small_PW)
        return ComparedColumn(signal.stage, signal.name, differs_PW, signal.relative_PW)

    def _traced(self, stage: Stage, kind: str) -> ComparedColumn:
        differs_P1 = np.zeros((len(self), 1), bool)
        relative_P1 = np.full((len(self), 1), np.nan)
        for pair in range(len(self)):
            apart = self.distance(pair, kind)
            if apart is not None:
                differs_P1[pair] = apart.differs_N.any()
                relative_P1[pair] = apart.total if differs_P1[pair] else 0.0
        return ComparedColumn(stage, f"traces ({kind})", differs_P1, relative_P1, per_worker=False)

    def _floats(self, stage: Stage, name: str, one: Floats, other: Floats) -> ComparedColumn:
        known = np.isfinite(one) & np.isfinite(other)
        with np.errstate(invalid="ignore", divide="ignore"):
            apart = np.abs(one - other)
            size = np.maximum(np.abs(one), np.abs(other))
            relative = np.where(apart == 0, 0.0, apart / size)
        relative[~known] = np.nan
        return ComparedColumn(stage, name, known & (one != other), relative)

    def _column(self, name: str, stage: Stage) -> ComparedColumn:
        """Compare a column of the workers by its type: number, digest or flag."""
        one, other = self.values(name)
        if one.dtype == np.float64:
            return self._floats(stage, name, one, other)
        if one.dtype == np.bool_:
            differs_PW = one != other
            return ComparedColumn(stage, name, differs_PW, np.where(differs_PW, np.inf, np.nan))
        known_PW = (one != MISSING_INT) & (other != MISSING_INT)
        if name in _NEED_LAYOUT:
            layout_a, layout_b = self.values("state_layout")
            known_PW &= (layout_a == layout_b) & self.alignment.same_slots
        return ComparedColumn(stage, name, known_PW & (one != other), np.full(one.shape, np.nan))

    def _only_one_diverged(self) -> ComparedColumn:
        alone_P1 = np.logical_or(*self.diverged().values())[:, None]
        relative_P1 = np.where(alone_P1, np.inf, np.nan)
        return ComparedColumn(Stage.LOSS, "nonfinite", alone_P1, relative_P1, per_worker=False)


_NUMBERS = ("grad_norm", "reduced_norm", "lr", "weight_decay")  # columns whose values are shown
_TRACED = {Stage.GRADIENT: "reduced", Stage.UPDATE: "parameter"}
ONE_BUCKET = 0.95  # of a squared distance in one number of one sketch: a single element differs

LEAST_STEPS = 4  # known distances that a fit, or a trend before a jump, needs

JUMP = 300.0
"""A distance this many times beyond the trend is a jump.

Training amplifies differences: AdamW turns the rounding of a gradient near zero into a whole
learning rate. So the trend is the largest of all distances before, and the first steps after the
runs have parted, where this happens, never count.
"""

CURVES = ("parameters", "gradient", "loss")  # whose growth is fitted, the most informative first


def first_parting(pair: Pair, signals: Sequence[ComparedColumn], dtype: str) -> Parting | None:
    """Return the first step in which two runs part, and its first stage; ULP are of ``dtype``."""
    firsts = {
        (int(rows[0]), list(Stage).index(signal.stage)): None
        for signal in signals
        if len(rows := np.flatnonzero(signal.differs_PW.any(axis=1)))
    }
    if not firsts:
        return None
    at, order = min(firsts)
    stage = list(Stage)[order]
    showing = [s for s in signals if s.stage is stage and s.differs_PW[at].any()]
    best = showing[0]
    apart_W = best.relative_PW[at][best.differs_PW[at]]
    relative = math.nan if np.isnan(apart_W).all() else float(np.nanmax(apart_W))
    apart = tensors_at(pair, at, stage)
    steps = pair.alignment
    shown = Parting(
        step=int(steps.steps_a[at]),
        step_b=int(steps.steps_b[at]),
        stage=stage,
        signal=best.name,
        ranks=ranks_of(showing, at),
        relative=relative,
        dtype=dtype,
        predicted=predicted(pair, at, (dtype, dtype)) if stage is Stage.GRADIENT else math.nan,
        resolution=_resolution(pair, at, stage, apart),
    )
    values = _with_values(pair, shown, at, best)
    return values if apart is None else _with_tensors(values, apart)


def tensors_at(pair: Pair, at: int, stage: Stage) -> TensorDistance | None:
    """Return the tensors that show a stage; None where none are traced or none differs."""
    if stage is Stage.START:
        found = [pair.distance(at, kind, back=1) for kind in BEFORE]
    elif stage in _TRACED:
        found = [pair.distance(at, _TRACED[stage])]
    else:
        found = []
    return next((each for each in found if each is not None and each.differs_N.any()), None)


def ranks_of(showing: Sequence[ComparedColumn], at: int) -> tuple[int, ...]:
    """Return the workers on which any of these signals differs."""
    ranks: set[int] = set()
    for signal in showing:
        if signal.per_worker:
            ranks |= set(np.flatnonzero(signal.differs_PW[at]).tolist())
    return tuple(sorted(ranks))


def predicted(pair: Pair, at: int, dtypes: tuple[str, str], *, rounded: bool = False) -> float:
    """Return the relative distance of two reduced gradients that rounding alone predicts.

    The two errors are independent, so their squares add up. ``dtypes`` are the types in which A
    and B add up; ``rounded``: the inputs are rounded to them first, as in a 16-bit reduction.
    """
    cosine = mean_cosine(pair, at)
    squares = [
        predicted_error(width, sums=dtype, inputs=dtype if rounded else None, cosine=cosine) ** 2
        for width, dtype in zip(pair.alignment.num_workers, dtypes, strict=True)
    ]
    return math.sqrt(sum(squares))


def mean_cosine(pair: Pair, at: int) -> float:
    """Return the workers' weighted mean cosine in run A; 0 where it is not known."""
    step = int(pair.alignment.steps_a[at])
    row = int(np.searchsorted(pair.a.steps_T, step))
    norms = pair.a.column("grad_norm")[row]
    width = pair.a.num_workers
    total = pair.a.per_step("grad_norm_reduced")[row]
    if width < 2 or not np.isfinite(norms).all() or not np.isfinite(total) or not norms.any():
        return 0.0
    mean_square = float((norms**2).mean())
    cosine = (width * total**2 / mean_square - 1) / (width - 1)
    return float(np.clip(cosine, -0.99 / (width - 1), 1.0))


def single_element(apart: TensorDistance | None) -> str:
    """Return the one tensor that differs in a single element; empty if it is not so.

    A number in the last places of one element changes a single number of one sketch. Rounding
    changes many elements of many tensors.
    """
    if apart is None or len(apart.names) < 2:
        return ""
    rows = np.flatnonzero(apart.differs_N)
    if len(rows) != 1:
        return ""
    buckets_K = apart.buckets_NK[rows[0]]
    few = np.count_nonzero(buckets_K) <= 1 or np.isnan(buckets_K).all()
    return apart.names[rows[0]] if few else ""


def spike(apart: TensorDistance | None) -> str:
    """Return the tensor whose one element makes up nearly all of a distance; empty if none."""
    if apart is None:
        return ""
    total = float(apart.buckets_NK.sum())
    if not math.isfinite(total) or total <= 0:
        return ""
    row, _ = np.unravel_index(int(apart.buckets_NK.argmax()), apart.buckets_NK.shape)
    return apart.names[row] if apart.buckets_NK.max() >= ONE_BUCKET * total else ""


def most_apart(apart: TensorDistance | None) -> str:
    """Return the tensor that contributes most to a distance, or has become infinite."""
    if apart is None or not apart.differs_N.any():
        return ""
    return apart.names[int(np.nan_to_num(apart.distance_N, nan=np.inf).argmax())]


def _with_values(pair: Pair, shown: Parting, at: int, signal: ComparedColumn) -> Parting:
    """Add the two values at the worker that differs most, and their distance in ULP."""
    if signal.name == "loss":
        one, other = pair.losses()
    elif signal.name in _NUMBERS:
        one, other = pair.values(signal.name)
    else:
        return shown
    rank = int(np.nan_to_num(signal.relative_PW[at], nan=-1.0).argmax())
    a = float(one[at, rank])
    b = float(other[at, rank])
    ulp = float(ulp_distance([a], [b], shown.dtype)[0])
    return replace(shown, value_a=a, value_b=b, ulp=ulp)


def _with_tensors(shown: Parting, apart: TensorDistance) -> Parting:
    relative = apart.relative()
    total = apart.total
    only = single_element(apart)
    return replace(
        shown,
        tensor=only or most_apart(apart) or next(iter(relative)),
        num_tensors=(len(relative), len(apart.names)),
        relative=total,
        ulp=total / (2 * UNIT_ROUNDOFF[shown.dtype]),
    )


def _resolution(pair: Pair, at: int, stage: Stage, apart: TensorDistance | None) -> str:
    if apart is not None:
        return "Both runs have traces: step and tensor are exact."
    if pair.distance(at, "reduced") is not None or pair.distance(at, "parameter") is not None:
        return "Both runs have traces: the step is exact; this stage has no tensors."
    if stage in (Stage.SAMPLES, Stage.RANDOM, Stage.SETTINGS, Stage.LOSS):
        return (
            "Without traces the step is exact for data, settings, random generators and losses; "
            "record both runs with watch(trace=True) to see single tensors."
        )
    return (
        "Without traces, parameters and gradients take turns in digests: in a large model they may "
        "have parted some steps earlier; record both runs with watch(trace=True) to see the first "
        "tensor."
    )


def curves_of(pair: Pair) -> tuple[Curve, ...]:
    """Return the relative distance of losses, reduced gradients and parameters over the steps."""
    steps = pair.alignment.steps_a
    one, other = pair.losses()
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        apart = np.sqrt(((one - other) ** 2).mean(axis=1))
        loss = np.where(apart == 0, 0.0, apart / np.abs(one).mean(axis=1))
        norm_a, norm_b = pair.steps_column("grad_norm_reduced")
        norms = np.where(norm_a == norm_b, 0.0, np.abs(norm_a - norm_b) / np.abs(norm_a))
    gradient = _traced(pair, "reduced")
    if np.isnan(gradient).all():
        gradient = norms
    found = [Curve("loss", steps, loss), Curve("gradient", steps, gradient)]
    found.append(Curve("parameters", steps, _traced(pair, "parameter")))
    return tuple(curve for curve in found if np.isfinite(curve.values).any())


def growth_of(curve: Curve) -> DifferenceGrowth | None:
    """Fit how a distance grows after it first differs from 0: by a factor per step, or a power.

    The better of both fits to the logarithms (least squares); None with fewer than four known
    distances.
    """
    known = np.flatnonzero(np.isfinite(curve.values) & (curve.values > 0))
    if len(known) < LEAST_STEPS:
        return None
    since = (curve.steps[known] - curve.steps[known[0]]).astype(float)
    logs = np.log(curve.values[known])
    rate, error_of_rate = _slope(since, logs)
    power, error_of_power = _slope(np.log(since + 1.0), logs)
    shape = "exponential" if error_of_rate < error_of_power else "power"
    if min(error_of_rate, error_of_power) > 0.98 * float(((logs - logs.mean()) ** 2).sum()):
        shape = "flat"
    return DifferenceGrowth(
        curve=curve.name,
        shape=shape,
        factor=math.exp(rate),
        exponent=power,
        first=float(curve.values[known[0]]),
        last=float(curve.values[known[-1]]),
        num_steps=len(known),
    )


def jump_of(pair: Pair, curves: tuple[Curve, ...]) -> Jump | None:
    """Return the first jump beyond the trend after two runs have parted; None without.

    A jump of a distance to hundreds of times all before, at least four steps after the parting; or
    a single element of a parameter that suddenly makes up the whole distance; or losses of one run
    alone that become infinite or NaN.
    """
    found = [jump for curve in curves if (jump := _jump_in(pair, curve)) is not None]
    spiked = _spike_in(pair)
    if spiked is not None:
        found.append(spiked)
    diverged = _divergence_in(pair, curves)
    if diverged is not None:
        found.append(diverged)
    return min(found, key=lambda jump: (jump.step, CURVES.index(jump.curve)), default=None)


def _jump_in(pair: Pair, curve: Curve) -> Jump | None:
    floor = 1e-5 if curve.name == "loss" else 0.0  # losses are recorded to 24 bits
    highest = 0.0
    seen = 0
    for at, value in enumerate(curve.values):
        if math.isnan(value) or value == 0:
            seen += seen > 0 and value == 0
            continue
        if seen >= LEAST_STEPS and highest > 0 and value > JUMP * highest and value > floor:
            kind = "reduced" if curve.name == "gradient" else "parameter"
            return _jump(pair, at, curve.name, highest, value, most_apart(pair.distance(at, kind)))
        highest = max(highest, value)
        seen = seen + 1
    return None


def _spike_in(pair: Pair) -> Jump | None:
    """Return the first step in which one element makes up the distance, and did not before."""
    before = ""
    seen = 0
    last = 0.0
    for at in range(len(pair)):
        apart = pair.distance(at, "parameter")
        if apart is None or not apart.differs_N.any():
            continue
        name = spike(apart)
        if name and not before and seen >= LEAST_STEPS and apart.total > 4 * last:
            return _jump(pair, at, "parameters", last, apart.total, name)
        before = name
        seen = seen + 1
        last = max(last, apart.total)
    return None


def _divergence_in(pair: Pair, curves: tuple[Curve, ...]) -> Jump | None:
    found = pair.divergence()
    if found is None:
        return None
    values = next((curve.values for curve in curves if curve.name == "loss"), np.empty(0))
    known = values[: found[0]][np.isfinite(values[: found[0]])]
    return _jump(pair, found[0], "loss", float(known.max(initial=0.0)), math.inf, "")


def _jump(pair: Pair, at: int, curve: str, before: float, after: float, tensor: str) -> Jump:
    steps = pair.alignment
    return Jump(int(steps.steps_a[at]), int(steps.steps_b[at]), curve, before, after, tensor)


def _traced(pair: Pair, kind: str) -> Floats:
    values = np.full(len(pair), np.nan)
    for at in range(len(pair)):
        apart = pair.distance(at, kind)
        if apart is not None:
            total = apart.total if apart.differs_N.any() else 0.0
            values[at] = math.inf if math.isnan(total) else total
    return values


def _slope(x: Floats, y: Floats) -> tuple[float, float]:
    """Return the slope of a least-squares line, and its sum of squared errors."""
    centred = x - x.mean()
    apart = y - y.mean()
    slope = float((centred @ apart) / (centred @ centred))
    return slope, float(((apart - slope * centred) ** 2).sum())

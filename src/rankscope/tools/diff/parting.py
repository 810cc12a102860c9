"""Where two runs first part, by how much, how that grows and where it jumps. P pairs of steps."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rankscope.bus.evidence import DType, Table
from rankscope.evidence import columns_of
from rankscope.stats.arrays import Floats
from rankscope.stats.rounding import UNIT_ROUNDOFF, predicted_error, ulp_distance
from rankscope.tools.diff.result import Curve, DifferenceGrowth, Jump, Moment, Parting
from rankscope.tools.diff.signals import BEFORE, ComparedColumn, Pair, TensorDistance

_NUMBERS = {s.name for s in columns_of(Table.WORKERS) if s.dtype is DType.FLOAT}
_TRACED = {Moment.REDUCED: "reduced", Moment.AFTER: "parameter"}
ONE_BUCKET = 0.95
"""Share of a squared distance in one number of one sketch that shows a single element."""

LEAST_STEPS = 4
"""Known distances that a fit, or a trend before a jump, needs."""

JUMP = 300.0
"""A distance this many times beyond the trend is a jump.

Training amplifies differences: AdamW turns the rounding of a gradient near zero into a whole
learning rate. So the trend is the largest of all distances before, and the first steps after the
runs have parted, where this happens, never count.
"""

CURVES = ("parameters", "gradient", "loss")
"""Curves whose growth is fitted, the most informative first."""


def first_parting(pair: Pair, signals: Sequence[ComparedColumn], dtype: str) -> Parting | None:
    """Return the first step in which two runs part, and its first moment; ULP are of ``dtype``."""
    firsts = {
        (int(rows[0]), list(Moment).index(signal.moment)): None
        for signal in signals
        if len(rows := np.flatnonzero(signal.differs_PW.any(axis=1)))
    }
    if not firsts:
        return None
    at, order = min(firsts)
    moment = list(Moment)[order]
    showing = [s for s in signals if s.moment is moment and s.differs_PW[at].any()]
    best = showing[0]
    apart_W = best.relative_PW[at][best.differs_PW[at]]
    relative = math.nan if np.isnan(apart_W).all() else float(np.nanmax(apart_W))
    apart = tensors_at(pair, at, moment)
    steps = pair.alignment
    shown = Parting(
        step=int(steps.steps_a[at]),
        step_b=int(steps.steps_b[at]),
        moment=moment,
        signal=best.name,
        ranks=ranks_of(showing, at),
        relative=relative,
        dtype=dtype,
        predicted=predicted(pair, at, (dtype, dtype)) if moment is Moment.REDUCED else math.nan,
        resolution=_resolution(pair, at, moment, apart),
    )
    values = _with_values(pair, shown, at, best)
    return values if apart is None else _with_tensors(values, apart)


def tensors_at(pair: Pair, at: int, moment: Moment) -> TensorDistance | None:
    """Return the tensors that show a moment; None where none are traced or none differs."""
    if moment is Moment.BEFORE:
        found = [pair.distance(at, kind, back=1) for kind in BEFORE]
    elif moment in _TRACED:
        found = [pair.distance(at, _TRACED[moment])]
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


def _resolution(pair: Pair, at: int, moment: Moment, apart: TensorDistance | None) -> str:
    if apart is not None:
        return "Both runs have traces: step and tensor are exact."
    if pair.distance(at, "reduced") is not None or pair.distance(at, "parameter") is not None:
        return "Both runs have traces: the step is exact; this moment has no tensors."
    if moment in (Moment.DATA, Moment.RANDOM, Moment.SETTINGS, Moment.LOSS):
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

"""Where two runs first part, and by how much."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rankscope.core.rounding import UNIT_ROUNDOFF, predicted_error, ulp_distance
from rankscope.numerics.diff.result import Moment, Parting
from rankscope.numerics.diff.signals import BEFORE, Compared, Pair, TensorDistance

_TRACED = {Moment.REDUCED: "reduced", Moment.AFTER: "parameter"}
ONE_BUCKET = 0.95
"""Share of a squared distance in one number of one sketch that shows a single element."""


def first_parting(pair: Pair, signals: Sequence[Compared], dtype: str) -> Parting | None:
    """Return where two runs first part: the first step, and in it the first moment.

    Args:
        pair: The two runs.
        signals: What is compared.
        dtype: The type in whose last place distances are told.
    """
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
    relative = _largest(best.relative_PW[at][best.differs_PW[at]])
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


def ranks_of(showing: Sequence[Compared], at: int) -> tuple[int, ...]:
    """Return the workers on which any of these signals differs."""
    ranks: set[int] = set()
    for signal in showing:
        if signal.per_worker:
            ranks |= set(np.flatnonzero(signal.differs_PW[at]).tolist())
    return tuple(sorted(ranks))


def predicted(pair: Pair, at: int, dtypes: tuple[str, str], *, rounded: bool = False) -> float:
    """Return the relative distance of two reduced gradients that rounding alone predicts.

    The two errors are independent, so their squares add up.

    Args:
        pair: The two runs.
        at: Number of the pair of steps.
        dtypes: The types in which A and B add up.
        rounded: Whether the inputs are rounded to that type first, as in a 16-bit reduction.
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
    norms, width = pair.a.column("grad_norm")[row], pair.a.num_workers
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


def _with_values(pair: Pair, shown: Parting, at: int, signal: Compared) -> Parting:
    """Add the two values at the worker that differs most, and their distance in ULP."""
    if signal.name == "loss":
        one, other = pair.losses()
    elif signal.name in ("grad_norm", "lr", "weight_decay", "reduced_norm"):
        one, other = pair.values(signal.name)
    else:
        return shown
    rank = int(np.nan_to_num(signal.relative_PW[at], nan=-1.0).argmax())
    a, b = float(one[at, rank]), float(other[at, rank])
    ulp = float(ulp_distance([a], [b], shown.dtype)[0])
    return _replaced(shown, {"value_a": a, "value_b": b, "ulp": ulp})


def _with_tensors(shown: Parting, apart: TensorDistance) -> Parting:
    relative = apart.relative()
    total = apart.total
    only = single_element(apart)
    return _replaced(
        shown,
        {
            "tensor": only or most_apart(apart) or next(iter(relative)),
            "num_tensors": (len(relative), len(apart.names)),
            "relative": total,
            "ulp": total / (2 * UNIT_ROUNDOFF[shown.dtype]),
        },
    )


def _replaced(shown: Parting, changes: Mapping[str, object]) -> Parting:
    fields = {name: getattr(shown, name) for name in Parting.__slots__}
    return Parting(**{**fields, **changes})


def _largest(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.max()) if len(known) else math.nan


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

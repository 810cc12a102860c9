"""What a difference of two tensors looks like, in words."""

import math
from collections.abc import Sequence

import numpy as np

from rankscope.bus.parity import QUARTERS
from rankscope.stats.arrays import Floats
from rankscope.tools.parity.reading import Recording, Whole
from rankscope.tools.parity.result import Difference

_PARALLEL = 0.999
_NEAR = 0.01
_CLOSE = 2e-4
_ORDINALS = ("first", "second", "third", "last")


def describe(name: str, first: Whole, second: Whole, bound: float) -> Difference:
    """Return how a tensor of B differs from that of A."""
    norm = max(first.norm, second.norm)
    apart_Q = np.linalg.norm(first.sketches_QK - second.sketches_QK, axis=1)
    distance = float(np.linalg.norm(apart_Q))
    factor, cosine = _relation(first.sketches_QK, second.sketches_QK)
    relative = distance / norm if norm > 0 else math.nan
    share = bound / norm if norm > 0 else math.nan
    if not math.isfinite(distance):
        own, other = np.isfinite(first.norm), np.isfinite(second.norm)
        look = "not finite in both" if own == other else f"not finite in {'B' if own else 'A'}"
        return Difference(name, math.nan, share, math.nan, math.nan, look)
    parts = apart_Q > bound / math.sqrt(QUARTERS)
    held = first.squares_Q + second.squares_Q > 0
    look = _look(factor, cosine, first.norm, second.norm)
    if parts.any() and (held & ~parts).any():
        where = np.flatnonzero(parts)
        own = _relation(first.sketches_QK[where], second.sketches_QK[where])
        norms = [math.sqrt(each.squares_Q[where].sum()) for each in (first, second)]
        inside = _look(*own, *norms)
        quarters = _listed([_ORDINALS[part] for part in where])
        look = f"{inside}, in the {quarters} quarter of its elements alone"
    return Difference(name, relative, share, factor, cosine, look)


def _relation(first: Floats, second: Floats) -> tuple[float, float]:
    """Return the factor of B along A, and the cosine; NaN where one is zero."""
    product = float((first * second).sum())
    own, other = float(np.linalg.norm(first)), float(np.linalg.norm(second))
    factor = product / own**2 if own > 0 else math.nan
    cosine = product / (own * other) if own > 0 and other > 0 else math.nan
    return factor, cosine


def _look(factor: float, cosine: float, own: float, other: float) -> str:
    largest = max(own, other)
    if other <= 1e-6 * largest:
        return "zero in B"
    if own <= 1e-6 * largest:
        return "zero in A"
    if abs(cosine) >= _PARALLEL:
        return times(factor)
    return f"in another direction (cosine {cosine:.3g}, norm × {other / own:.3g})"


def times(factor: float) -> str:
    """Return a factor in words."""
    if factor < 0:
        return "the opposite sign" if abs(factor + 1) < _NEAR else f"× {factor:.4g}"
    if abs(factor - 1) < _CLOSE:
        return "nearly the same"
    return f"× {factor:.4g}" if abs(factor - 1) < _NEAR else f"× {_number(factor)}"


def likely(factor: float, sides: tuple[Recording, Recording]) -> str:
    """Return what a factor of all may be the number of, in brackets; empty if of nothing."""
    a, b = sides
    counts = {
        "workers": b.workers / a.workers,
        "micro-batches": b.passes / a.passes,
        "workers × micro-batches": b.workers * b.passes / (a.workers * a.passes),
        "ranks": b.world / a.world,
    }
    for label, ratio in counts.items():
        if ratio == 1:
            continue
        for value, words in (
            (ratio, f"the ratio of {label}"),
            (1 / ratio, f"1 over the ratio of {label}"),
        ):
            if abs(factor / value - 1) < _NEAR:
                return f" ({words})"
    return ""


def _number(factor: float) -> str:
    if abs(factor - round(factor)) < _NEAR * factor and factor > 1:
        return str(round(factor))
    inverse = 1 / factor if factor else math.inf
    if abs(inverse - round(inverse)) < _NEAR * inverse and inverse > 1:
        return f"1/{round(inverse)}"
    return f"{factor:.3g}"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"

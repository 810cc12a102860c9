"""Rounding errors of a sum over workers: unit roundoffs, bounds, and expected errors.

A sum of W vectors rounds each partial sum. For elements whose leading digits follow Benford's law
the error of one rounding has a root mean square of ``sqrt((3/8 / ln 2) / 3) = 0.425`` unit
roundoffs, and errors of different roundings are close to independent, so that

    |error|^2  ~  0.18 u^2 (sum of the squared norms of all partial sums).

The norms of partial sums follow from the workers' mean cosine c: j gradients of norm 1 have a sum
of squared norm ``j + j (j - 1) c``.

Source of the bounds: Higham, "Accuracy and Stability of Numerical Algorithms" (2002), chapter 4.
"""

import math
from enum import StrEnum
from typing import Any

import numpy as np

from rankscope.errors import UsageError
from rankscope.stats.arrays import Floats, Floats32, Ints

UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}
"""Largest relative error of one rounding to nearest, by the type's name."""

_COARSEST = UNIT_ROUNDOFF["bfloat16"]


def tolerance_of(dtype: str) -> float:
    """Return the distance of replicas that rounding may explain, relative to their norm.

    Replicas that compute by themselves, in another order, agree in half of the digits of a type at
    least: the square root of its unit roundoff. Parts of a gradient do not agree in the first one.

    Example:
        >>> round(tolerance_of("float32"), 5), round(tolerance_of("bfloat16"), 3)
        (0.00024, 0.062)
    """
    return math.sqrt(UNIT_ROUNDOFF.get(dtype, _COARSEST))


RMS_OF_ROUNDING = math.sqrt(0.375 / math.log(2) / 3)
"""Root mean square of the relative error of one rounding, in unit roundoffs."""

_ORDERED: dict[str, type[np.signedinteger[Any]]] = {
    "float64": np.int64,
    "float32": np.int32,
    "float16": np.int16,
}


class Algorithm(StrEnum):
    """The order in which a reduction adds up the workers' values."""

    SEQUENTIAL = "sequential"
    """One after the other, in rank order."""
    RING = "ring"
    """One after the other, beginning at another rank for each W-th of the buffer."""
    TREE = "tree"
    """In pairs, and pairs of pairs."""


def predicted_error(
    num_workers: int,
    *,
    sums: str,
    inputs: str | None = None,
    result: str | None = None,
    algorithm: Algorithm = Algorithm.RING,
    cosine: float = 0.0,
) -> float:
    """Return the relative error that rounding alone gives the mean of W gradients.

    That is the expected Euclidean norm of the error, over the norm of the mean; infinite when the
    gradients cancel. ``sums`` is the type of partial sums, a key of :data:`UNIT_ROUNDOFF`.
    Gradients are rounded to ``inputs`` beforehand, and the sum to ``result`` in the end, unless
    these are None. ``cosine`` is the mean over pairs of workers.

    Example:
        >>> [f"{predicted_error(8, sums=dtype):.1e}" for dtype in ("float32", "bfloat16")]
        ['5.3e-08', '3.5e-03']
    """
    total = _squared_norm(num_workers, cosine)
    if total <= 0:
        return math.inf
    partial = sum(_squared_norm(j, cosine) for j in _partial_sums(num_workers, algorithm))
    if num_workers & (num_workers - 1):  # dividing by W rounds once more
        partial += total
    variance = _roundoff(sums) ** 2 * partial
    if inputs is not None:
        variance += _roundoff(inputs) ** 2 * num_workers
    if result is not None:
        variance += _roundoff(result) ** 2 * total
    return RMS_OF_ROUNDING * math.sqrt(variance / total)


def worst_error(num_terms: int, dtype: str, algorithm: Algorithm = Algorithm.SEQUENTIAL) -> float:
    """Return the first-order bound of a sum's error, in terms of the sum of its terms' sizes.

    ``(n - 1) u`` for one after the other, ``ceil(log2 n) u`` for a tree.

    Example:
        >>> worst_error(9, "float32") / 2**-24, worst_error(9, "float32", Algorithm.TREE) / 2**-24
        (8.0, 4.0)
    """
    depth = num_terms - 1
    if algorithm is Algorithm.TREE:
        depth = max(num_terms - 1, 0).bit_length()
    return max(depth, 0) * _roundoff(dtype)


def ulp_distance(first: Any, second: Any, dtype: str = "float32") -> Floats:
    """Return how many numbers of a type lie between two arrays' elements, one by one.

    Both are rounded to the type first: ``float64``, ``float32``, ``float16`` or ``bfloat16``. 0 for
    equal elements (and for the two zeros, and two NaN); NaN where exactly one of the two is NaN.

    Example:
        >>> ulp_distance([1.0, 1.0, 0.0], [1.0 + 2**-23, 1.0 - 2**-23, -0.0]).tolist()
        [1.0, 2.0, 0.0]
    """
    a = _order_of(first, dtype)
    b = _order_of(second, dtype)
    distance = np.abs(a.astype(np.float64) - b.astype(np.float64))
    if dtype == "float64":  # differences of neighbours must not drown
        near = (a < 0) == (b < 0)
        distance[near] = np.abs(a[near] - b[near]).astype(np.float64)
    nan_a = np.isnan(np.asarray(first, float))
    nan_b = np.isnan(np.asarray(second, float))
    distance[nan_a != nan_b] = np.nan
    distance[nan_a & nan_b] = 0.0
    return distance


def _order_of(values: Any, dtype: str) -> Ints:
    """Return integers that have the order of the numbers, without a gap."""
    _roundoff(dtype)
    if dtype == "bfloat16":
        bits = round_to_bfloat16(values).view(np.int32) >> 16
        least = -(1 << 15)
    else:
        with np.errstate(over="ignore"):
            bits = np.atleast_1d(np.asarray(values)).astype(dtype).view(_ORDERED[dtype])
        least = int(np.iinfo(_ORDERED[dtype]).min)
    wide = bits.astype(np.int64)
    return np.where(wide < 0, least - wide, wide)


def round_to_bfloat16(values: Any) -> Floats32:
    """Round to the nearest bfloat16, ties to even; returns them as float32, at least 1-d.

    Example:
        >>> round_to_bfloat16([1.0, 1.003, 1.005]).tolist()
        [1.0, 1.0, 1.0078125]
    """
    with np.errstate(over="ignore"):
        single = np.atleast_1d(np.asarray(values)).astype(np.float32)
    bits = single.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded &= np.uint32(0xFFFF0000)
    return np.where(np.isnan(single), single, rounded.view(np.float32)).astype(np.float32)


def _partial_sums(num_workers: int, algorithm: Algorithm) -> list[int]:
    """Return the number of terms of each rounded partial sum."""
    if algorithm is not Algorithm.TREE:
        return list(range(2, num_workers + 1))
    sizes = [1] * num_workers
    rounded = []
    while len(sizes) > 1:
        merged = [a + b for a, b in zip(sizes[::2], sizes[1::2], strict=False)]
        rounded += merged
        sizes = merged + sizes[len(merged) * 2 :]
    return rounded


def _squared_norm(count: int, cosine: float) -> float:
    return count + count * (count - 1) * cosine


def _roundoff(dtype: str) -> float:
    try:
        return UNIT_ROUNDOFF[dtype]
    except KeyError:
        raise UsageError(
            f"expected one of the types {', '.join(UNIT_ROUNDOFF)}, got {dtype!r}"
        ) from None

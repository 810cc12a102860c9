"""Sums over workers as reductions compute them: in a given order, type and scheme.

Shapes: W workers, N elements, B buckets. The gradients are rounded to the type of the buffer
(``inputs``) and divided by W, as DDP does; partial sums are rounded to ``sums`` after each
addition, and the mean comes back in the buffer's type. Values are float32 arrays throughout, which
hold numbers of the 16-bit types exactly. An addition of two bfloat16 or float16 numbers in float32,
rounded to 16 bits afterwards, is the correctly rounded one, because float32 has more than twice as
many digits (Figueroa, "When is double rounding innocuous?", 1995).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.rounding import (
    UNIT_ROUNDOFF,
    Algorithm,
    round_to_bfloat16,
    worst_error,
)

BUCKET_ELEMENTS = 262_144  # with an arrival order of their own: 1 MiB of float32, as DDP's first

TYPES = ("float32", "bfloat16", "float16")

Array = NDArray[np.float32]


class Scheme(StrEnum):
    """In which order a reduction adds up the workers' values; each takes them permuted as well."""

    SEQUENTIAL = "sequential"  # one after the other
    RING = "ring"  # one after the other, from one worker further on for each W-th of the buffer
    TREE = "tree"  # neighbours in pairs, then pairs of pairs
    HALVING = "halving"  # with the worker half the ring away, then a quarter, and so on
    ARRIVAL = "arrival"  # one after the other, in an order of its own for each bucket

    @property
    def algorithm(self) -> Algorithm:
        """The scheme with the same partial sums, for which errors are predicted."""
        if self in (Scheme.TREE, Scheme.HALVING):
            return Algorithm.TREE
        return Algorithm.RING if self is Scheme.RING else Algorithm.SEQUENTIAL


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The types of a reduction, of :data:`TYPES`: of the buffer, and of partial sums."""

    inputs: str = "float32"
    sums: str = "float32"


def round_to(values: Array, dtype: str) -> Array:
    """Round float32 values to a type of :data:`TYPES`; too large ones become infinite."""
    if dtype == "float32":
        return values
    if dtype == "bfloat16":
        return round_to_bfloat16(values)
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


def to_buffers(gradients_WN: Array, arithmetic: Arithmetic) -> Array:
    """Return the workers' buffers ``[W, N]``: gradients rounded, divided by W, rounded."""
    rounded = round_to(gradients_WN, arithmetic.inputs)
    return round_to(rounded / np.float32(len(gradients_WN)), arithmetic.inputs)


def reduce_buffers(
    buffers_WN: Array,
    scheme: Scheme,
    arithmetic: Arithmetic,
    order: NDArray[np.int64] | None = None,
    *,
    positions_N: NDArray[np.int64] | None = None,
    num_total: int | None = None,
    bucket_elements: int = BUCKET_ELEMENTS,
) -> Array:
    """Add up the workers' buffers and return their mean.

    The ``order`` is a permutation of the workers ``[W]``, for ``ARRIVAL`` one for each bucket ``[B,
    W]``; by default that of ranks. Where the buffers are a sample of larger ones, ``positions_N``
    is where each element stands in them, of ``num_total``.

    Example:
        >>> arithmetic = Arithmetic()
        >>> buffers = to_buffers(np.float32([[1.0], [2.0**-24], [2.0**-24], [-1.0]]), arithmetic)
        >>> reduce_buffers(buffers, Scheme.SEQUENTIAL, arithmetic).tolist()
        [0.0]
        >>> reduce_buffers(buffers, Scheme.SEQUENTIAL, arithmetic, np.array([1, 2, 0, 3])).tolist()
        [2.9802322387695312e-08]
    """
    num_workers, num_elements = buffers_WN.shape
    if positions_N is None:
        positions_N = np.arange(num_elements)
    num_total = num_total or num_elements
    if order is None:
        order = np.arange(num_workers)
    with np.errstate(over="ignore", invalid="ignore"):
        if scheme is Scheme.TREE:
            total = _add_tree([buffers_WN[worker] for worker in order], arithmetic.sums)
        elif scheme is Scheme.HALVING:
            total = _add_halving([buffers_WN[worker] for worker in order], arithmetic.sums)
        elif scheme is Scheme.SEQUENTIAL:
            total = _add_chain(iter(buffers_WN[worker] for worker in order), arithmetic.sums)
        else:
            if scheme is Scheme.RING:
                first_N = (positions_N * num_workers) // num_total
                rows = (order[(first_N + place) % num_workers] for place in range(num_workers))
            else:
                bucket_N = positions_N // bucket_elements
                rows = (order[bucket_N, place] for place in range(num_workers))
            column = np.arange(num_elements)
            total = _add_chain((buffers_WN[row, column] for row in rows), arithmetic.sums)
        return round_to(total, arithmetic.inputs)


def num_buckets(num_elements: int, bucket_elements: int = BUCKET_ELEMENTS) -> int:
    """Return how many buckets a buffer has."""
    return max(-(-num_elements // bucket_elements), 1)


def worst_factor(num_workers: int, scheme: Scheme, arithmetic: Arithmetic) -> float:
    """Return c such that the mean's error is at most ``c · mean |x|``, element by element.

    Roundings of inputs, partial sums, division and result are multiplied out. For partial sums it
    is ``(W - 1) u``, or ``ceil(log2 W) u`` for trees, which needs no term of higher order (Rump,
    "Error estimation of floating-point summation and dot product", 2012). Underflow comes on top:
    :func:`worst_underflow`.
    """
    factor = 1 + worst_error(num_workers, arithmetic.sums, scheme.algorithm)
    unit_in = UNIT_ROUNDOFF[arithmetic.inputs]
    if arithmetic.inputs != "float32":
        factor *= 1 + unit_in
    if num_workers & (num_workers - 1):  # no power of two
        factor *= 1 + unit_in
    if arithmetic.inputs != arithmetic.sums:
        factor *= 1 + unit_in
    return factor - 1


def worst_underflow(num_workers: int, arithmetic: Arithmetic) -> float:
    """Return the error of an element from rounding to the smallest numbers of the types."""
    least = {"float32": 2.0**-150, "bfloat16": 2.0**-134, "float16": 2.0**-25}[arithmetic.inputs]
    # Later roundings can enlarge these errors by their own factor, which is below 2.
    return 2 * (num_workers + 2) * least


def _add_chain(terms: Iterator[Array], dtype: str) -> Array:
    total = next(terms)
    for term in terms:
        total = round_to(total + term, dtype)
    return total


def _add_tree(terms: list[Array], dtype: str) -> Array:
    """Add neighbours; one that is left over waits for the next round."""
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=False)
        left_over = terms[-1:] if len(terms) % 2 else []
        terms = [round_to(first + second, dtype) for first, second in pairs] + left_over
    return terms[0]


def _add_halving(terms: list[Array], dtype: str) -> Array:
    """Add the upper half to the lower half; those beyond a power of two are added first."""
    width = 1 << int(math.log2(len(terms)))
    for extra in range(width, len(terms)):
        terms[extra - width] = round_to(terms[extra - width] + terms[extra], dtype)
    while width > 1:
        width //= 2
        terms = [round_to(terms[i] + terms[i + width], dtype) for i in range(width)]
    return terms[0]

"""Gradient directions, from the Gram matrix of gradients or of their sketches.

Legend of shapes: W workers, K numbers per gradient (or per linear sketch of it, narrow beyond 64
workers), g groups whose turn it is, k numbers in the narrow sketch of a group, N rows.

A zero or non-finite gradient has no direction. Its cosines are NaN and every mean leaves them out.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.arrays import Bools, Floats, Floats32, Ints, mix

ROUNDING = 1e-12
"""Cosines closer than this to ±1 are ±1: what float64 sums of a few thousand products can lose."""

DROWNED = 1e-3
"""A sum of float32 gradients this much shorter than its parts is lost in their rounding."""


def gram(sketches_WK: NDArray[np.floating]) -> Floats:
    """Return all inner products ``G_ij = g_i · g_j``, symmetric ``[..., W, W]``.

    ``sketches_WK`` holds gradients or sketches ``[..., W, K]`` of any magnitude: products are taken
    in float64. Rows and columns of workers with an infinity or NaN are NaN.

    Example:
        >>> gram(np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 4.0]])).tolist()
        [[1.0, 0.0, 3.0], [0.0, 4.0, 8.0], [3.0, 8.0, 25.0]]
    """
    rows_WK: Floats = np.asarray(sketches_WK, np.float64, order="C")
    with np.errstate(over="ignore", invalid="ignore"):
        products_WW: Floats = rows_WK @ rows_WK.swapaxes(-1, -2)
    if np.isfinite(products_WW.diagonal(0, -2, -1)).all():  # so are all numbers
        return products_WW
    finite_W: Bools = np.asarray(np.isfinite(rows_WK).all(axis=-1))
    if finite_W.all():
        return products_WW
    rows_WK = np.where(finite_W[..., None], rows_WK, 0.0)
    gram_WW: Floats = rows_WK @ rows_WK.swapaxes(-1, -2)
    gram_WW[~(finite_W[..., :, None] & finite_W[..., None, :])] = np.nan
    return gram_WW


def has_direction(gram_WW: Floats) -> Bools:
    """Return for each worker ``[..., W]`` whether its gradient is finite and not zero.

    Example:
        >>> has_direction(gram(np.array([[1.0, 0.0], [0.0, 0.0], [np.nan, 1.0]]))).tolist()
        [True, False, False]
    """
    squares_W = gram_WW.diagonal(0, -2, -1)
    return np.isfinite(squares_W) & (squares_W > 0)


def cosines_from_gram(gram_WW: Floats) -> Floats:
    """Return ``cos(g_i, g_j) = G_ij / sqrt(G_ii G_jj)``, symmetric ``[W, W]`` in [-1, 1].

    Identical gradients give exactly 1. Rows and columns of workers without a direction are NaN, the
    diagonal too.

    Example:
        >>> cosines_from_gram(gram(np.array([[3.0, 4.0], [4.0, 3.0], [-30.0, -40.0]]))).tolist()
        [[1.0, 0.96, -1.0], [0.96, 1.0, -0.96], [-1.0, -0.96, 1.0]]
    """
    norms_W = _norms(gram_WW)
    cosines_WW = _snap(gram_WW / (norms_W[:, None] * norms_W))
    defined = np.isfinite(norms_W).nonzero()[0]
    cosines_WW[defined, defined] = 1.0
    return cosines_WW


def mean_and_min_cosine(cosines_WW: Floats) -> tuple[float, float]:
    """Return the mean and the smallest over pairs i < j that are defined, or NaN without any.

    Example:
        >>> mean_and_min_cosine(np.array([[1.0, 0.5, 0.0], [0.5, 1.0, 1.0], [0.0, 1.0, 1.0]]))
        (0.5, 0.0)
    """
    pairs = upper_triangle(cosines_WW)
    pairs = pairs[np.isfinite(pairs)]
    if not pairs.size:
        return math.nan, math.nan
    mean = float(pairs.sum()) / len(pairs)
    return min(max(mean, -1.0), 1.0), float(pairs.min())


def norm_weighted_cosine(gram_WW: Floats) -> float:
    """Return ``Σ_{i≠j} G_ij / Σ_{i≠j} ‖g_i‖‖g_j‖``: cosines weighted by the norms' product.

    Workers without a direction are left out; with fewer than two others the result is NaN.

    Example:
        >>> norm_weighted_cosine(gram(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]])))  # 2 / 10
        0.2
    """
    defined_W = has_direction(gram_WW)
    if np.count_nonzero(defined_W) < 2:
        return math.nan
    kept_WW = gram_WW[np.ix_(defined_W, defined_W)] if not defined_W.all() else gram_WW
    kept_WW = kept_WW.copy()
    norms_W = np.sqrt(kept_WW.diagonal())
    np.fill_diagonal(kept_WW, 0.0)
    return _ratio(float(kept_WW.sum()), _sum_of_products(norms_W))


def norm_weighted_cosine_from_mean(norms_W: Floats, mean_gradient_norm: float) -> float:
    """Return the norm-weighted cosine without any pair, from ``W`` norms and the norm of the mean.

    ``Σ_{i≠j} g_i·g_j = W²‖ḡ‖² − Σ‖g_i‖²``, so it is exact when ``ḡ`` is the exact mean. NaN when a
    norm is not finite or fewer than two are positive.

    Example:
        >>> norm_weighted_cosine_from_mean(np.array([3.0, 4.0]), 2.5)  # a right angle
        0.0
    """
    scale = float(np.max(norms_W, initial=0.0))
    if not np.isfinite([*norms_W, mean_gradient_norm]).all() or np.sum(norms_W > 0) < 2:
        return float("nan")
    relative_W = norms_W / scale
    total = len(norms_W) * mean_gradient_norm / scale
    return _ratio(total**2 - float(np.sum(relative_W**2)), _sum_of_products(relative_W))


def leave_one_out(gram_WW: Floats) -> Floats:
    """Return ``cos(g_i, Σ_{j≠i} g_j)`` ``[..., W]``: how far each points where the others point.

    The sums run over workers with a direction. They leave worker i out from the start rather
    than subtract it, so that a worker with a huge norm does not drown the others. NaN for a worker
    without a direction, or when the others' sum vanishes.

    Example:
        >>> gradients_WK = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> leave_one_out(gram(gradients_WK)).round(3).tolist()  # 2/√5, and a right angle
        [0.894, 0.894, 0.894, 0.0]
    """
    norms_W = _norms(gram_WW)
    defined_W = np.isfinite(norms_W)
    known_W = norms_W
    kept_WW = gram_WW.copy()
    if not defined_W.all():
        known_W = np.where(defined_W, norms_W, 0.0)
        kept_WW[~(defined_W[..., :, None] & defined_W[..., None, :])] = 0.0
    rest_squares_W = _sums_without_own(kept_WW)
    rest_norms_W = known_W.sum(axis=-1, keepdims=True) - known_W
    vanishing_W = rest_squares_W <= ROUNDING * rest_norms_W**2
    i = np.arange(kept_WW.shape[-1])
    kept_WW[..., i, i] = 0.0
    rest_lengths_W = np.sqrt(np.where(vanishing_W, np.nan, rest_squares_W))
    return _snap(kept_WW.sum(axis=-1) / norms_W / rest_lengths_W)


def upper_triangle(cosines_WW: Floats) -> Floats:
    """Return the pairs i < j row by row, ``[W(W−1)/2]``.

    Example:
        >>> upper_triangle(np.array([[1.0, 0.5, 0.2], [0.5, 1.0, 0.1], [0.2, 0.1, 1.0]])).tolist()
        [0.5, 0.2, 0.1]
    """
    return cosines_WW.take(_pairs(len(cosines_WW))[0])


def from_upper_triangle(values: NDArray[np.floating], num_workers: int) -> Floats:
    """Return the symmetric ``[W, W]`` matrix whose pairs i < j are ``values``, row by row.

    The diagonal is 1, and NaN for a worker none of whose pairs is defined. A ValueError: ``values``
    are not W(W−1)/2 numbers.

    Example:
        >>> from_upper_triangle(np.array([0.5, 0.2, 0.1]), num_workers=3).tolist()
        [[1.0, 0.5, 0.2], [0.5, 1.0, 0.1], [0.2, 0.1, 1.0]]
    """
    expected = num_workers * (num_workers - 1) // 2
    if len(values) != expected:
        raise ValueError(
            f"expected {expected} cosines for {num_workers} workers, got {len(values)}"
        )
    cosines = np.ones(num_workers**2)
    for places in _pairs(num_workers):
        cosines[places] = values
    cosines_WW = cosines.reshape(num_workers, num_workers)
    if not np.isfinite(values).all():
        np.fill_diagonal(cosines_WW, np.nan)
        some_W = np.isfinite(cosines_WW).any(axis=1)
        np.fill_diagonal(cosines_WW, np.where(some_W, 1.0, np.nan))
    return cosines_WW


@functools.lru_cache(maxsize=8)
def _pairs(num_workers: int) -> tuple[Ints, Ints]:
    """Return where the pairs i < j are in a flattened ``[W, W]`` matrix, and where their mirror."""
    rows, columns = np.triu_indices(num_workers, 1)
    places = rows * num_workers + columns, columns * num_workers + rows
    for indices in places:
        indices.flags.writeable = False
    return places


def _norms(gram_WW: Floats) -> Floats:
    squares_W = gram_WW.diagonal(0, -2, -1)
    defined_W = has_direction(gram_WW)
    return np.sqrt(squares_W if defined_W.all() else np.where(defined_W, squares_W, np.nan))


def _snap(cosines: Floats) -> Floats:
    """Bring values within rounding of ±1 to ±1, and any others into [-1, 1]; a copy if need be."""
    near = np.abs(cosines) >= 1.0 - ROUNDING
    return np.where(near, np.sign(cosines), cosines) if near.any() else cosines


def _sum_of_products(norms_W: Floats) -> float:
    """Return ``Σ_{i≠j} n_i n_j`` without cancellation."""
    before_W = np.zeros(len(norms_W))
    before_W[1:] = np.cumsum(norms_W)[:-1]
    return 2.0 * float(np.sum(norms_W * before_W))


def _ratio(numerator: float, denominator: float) -> float:
    if denominator <= 0:
        return math.nan
    return snapped(numerator / denominator)


def snapped(cosine: float) -> float:
    """Bring a cosine within rounding of ±1 to ±1.

    Example:
        >>> snapped(1 - 1e-13), snapped(0.5)
        (1.0, 0.5)
    """
    return math.copysign(1.0, cosine) if abs(cosine) >= 1.0 - ROUNDING else cosine


def _sums_without_own(matrices_WW: Floats) -> Floats:
    """Return for each i the sum of a symmetric matrix ``[..., W, W]`` without its row and column i.

    Adds the three blocks beside row and column i (above left, below right, and twice above
    right), each a corner of a two-dimensional running sum: O(W²), and nothing is subtracted.
    """
    *sets, num_workers, _ = matrices_WW.shape
    padded = np.zeros((*sets, num_workers + 2, num_workers + 2))
    padded[..., 1:-1, 1:-1] = matrices_WW
    above = padded.cumsum(-2)
    below = padded[..., ::-1, :].cumsum(-2)[..., ::-1, :]
    above_left = above.cumsum(-1)[..., :-2, :-2]
    above_right = above[..., ::-1].cumsum(-1)[..., ::-1]
    below_right = below[..., ::-1].cumsum(-1)[..., ::-1][..., 2:, 2:]
    beside: Floats = above_left.diagonal(0, -2, -1) + below_right.diagonal(0, -2, -1)
    return beside + 2.0 * above_right.diagonal(2, -2, -1)


_LOST = 2.0**-11
"""A sum this much smaller than its terms is mostly their rounding to half precision."""

_DROWNED = 1e-6
"""Squares of a rest that is this much smaller than the worker beside it are computed anew."""

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 times the golden ratio's fraction

_TOP = 15  # the largest number of a row is brought below 2^15: half precision ends at 65,504


class Narrowing(NamedTuple):
    """The size of narrow sketches, for each worker and step."""

    sketch_width: int  # numbers in the sketch of the gradient, a prime
    group_width: int  # numbers in the sketch of a group, a prime
    num_groups: int  # groups that have their turn in one step
    num_sections: int  # sections of the audit that have their turn in one step
    # numbers in the sketch of a section, a prime; their residuals err by 1/√(2 audit_width) of
    # themselves (RMS)
    audit_width: int


def narrowing_for(num_workers: int) -> Narrowing:
    """Return the sizes for so many workers: at 1,024 the root receives less than 4 MB a step.

    Example:
        >>> narrowing_for(1024)[:3]
        (509, 127, 4)
    """
    if num_workers <= 512:
        return Narrowing(1021, 251, 4, 4, 251)
    if num_workers <= 2048:
        return Narrowing(509, 127, 4, 2, 251)
    return Narrowing(251, 61, 4, 1, 127)


class Halves(NamedTuple):
    """Rows of half precision, each with a power of two of its own."""

    # NaN in a row that was not finite. Any number of axes before K.
    numbers_NK: NDArray[np.float16]
    exponents_N: NDArray[np.int16]

    def widened(self) -> Floats:
        """Return the rows in float64."""
        rows = self.numbers_NK.astype(np.float64)
        rows *= np.ldexp(1.0, self.exponents_N)[..., None]
        return rows


@dataclass(frozen=True, slots=True)
class Consensus:
    """Directions of the workers' gradients in a step, each against the rest, without any pair.

    Up to 64 workers the root gets all sketches, and compares all pairs. Beyond, the agent of each
    host narrows its workers' sketches, to fewer numbers of half precision. With s_i the narrow
    sketch of worker i, u_i = s_i/|s_i|, S = Σ s_j and U = Σ u_j over the n workers with a
    direction:

    - leave-one-out direction of worker i: cos(s_i, S − s_i), as :func:`leave_one_out` of all pairs;
    - mean cosine over pairs: (|U|² − n)/(n(n − 1));
    - mean cosine weighted by norms: (|S|² − Σ|s_i|²) / Σ_{i≠j} |s_i||s_j|.

    A worker's cosine c errs by about (1 − c²)/√K (RMS): 0.031, 0.044 or 0.063 for the widths of
    :func:`narrowing_for`, where the wide sketch has 0.016. The errors of workers and of steps are
    independent. The mean cosine errs by √(2/K)·(c + 1/n)·(1 − c): 6·10⁻⁵ for 1,024 unrelated
    gradients. Half precision adds 3·10⁻⁴ of a sketch's length, at right angles: 10⁻⁷ of a cosine
    near 1, less than 10⁻⁵ elsewhere, and nothing between equal sketches.
    """

    num_directions: int  # workers whose gradient has a direction
    cosine_mean: float  # mean cosine over their pairs. NaN below two.
    cosine_weighted: float  # the same, weighted by the product of norms
    # cosine between each worker and the sum of all others; NaN where one has no direction
    cosine_rest_W: Floats
    group_cosine_rest_Wg: Floats  # the same for each group whose turn it is


def in_turn(step: int, count: int, per_step: int) -> Ints:
    """Return whose turn it is among ``count`` in a step, by index ``[min(per_step, count)]``.

    Multiples of the golden ratio spread evenly whatever the interval between observed steps, so
    that no host needs it.

    Example:
        >>> [in_turn(step, 40, 4).tolist() for step in (0, 10, 20)]
        [[0, 1, 2, 3], [7, 8, 9, 10], [14, 15, 16, 17]]
    """
    first = (step * _GOLDEN % 2**64) * count >> 64
    return (first + np.arange(min(per_step, count))) % max(count, 1)


def fold(rows_NK: Floats32, width: int) -> Floats32:
    """Make narrower sketches: entry c, with a random sign, is added to entry c mod ``width``.

    ``[N, width]``, linear in the rows; the rows themselves where they are not wider.

    Example:
        >>> one, other = np.eye(7, dtype=np.float32)[:2, None] * 3
        >>> fold(one, 2).shape, bool((fold(one, 2) + fold(other, 2) == fold(one + other, 2)).all())
        ((1, 2), True)
    """
    num_rows, wide = rows_NK.shape
    if wide <= width:
        return rows_NK
    padded = np.zeros((num_rows, wide + -wide % width), np.float32)
    np.multiply(rows_NK, _signs(wide), out=padded[:, :wide])
    folded: Floats = padded.reshape(num_rows, -1, width).sum(axis=1, dtype=np.float64)
    return folded.astype(np.float32)


def narrow(rows_NK: Floats32, width: int) -> Halves:
    """Return sketches ``[N, K]`` of any magnitude in ``width`` numbers of half precision at most.

    Example:
        >>> halves = narrow(np.array([[3.0, 4.0], [3e30, 4e30]], np.float32), width=2)
        >>> halves.widened()[0].tolist(), halves.exponents_N.tolist()
        ([3.0, 4.0], [-12, 87])
    """
    rows = fold(rows_NK, width).astype(np.float64)
    largest_N = np.abs(rows).max(axis=1, initial=0.0)
    finite_N = np.isfinite(largest_N)
    exponents_N = np.frexp(np.where(finite_N, largest_N, 0.0))[1] - _TOP
    rows[~finite_N] = np.nan
    numbers = np.ldexp(rows, -exponents_N[:, None]).astype(np.float16)
    return Halves(numbers, exponents_N.astype(np.int16))


def consensus_of(sketches_WK: Floats, group_sketches_gWk: Floats) -> Consensus:
    """Compare each worker with all others, by narrow sketches.

    ``group_sketches_gWk`` are those of the groups whose turn it is; g may be 0.

    Example:
        >>> sketches_WK = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> found = consensus_of(sketches_WK, np.empty((0, 4, 2)))
        >>> found.cosine_rest_W.round(3).tolist(), found.cosine_mean  # 2/√5, and 3 of 6 pairs
        ([0.894, 0.894, 0.894, 0.0], 0.5)
    """
    rows_WK, norms_W = _with_direction(sketches_WK)
    total_K = rows_WK.sum(axis=0)
    defined = norms_W[norms_W > 0]
    count = len(defined)
    mean = weighted = float("nan")
    if count >= 2:
        unit_K = (1.0 / np.where(norms_W > 0, norms_W, np.inf)) @ rows_WK
        mean = snapped((float(unit_K @ unit_K) - count) / (count * (count - 1)))
        above = float(total_K @ total_K) - float(defined @ defined)
        weighted = snapped(above / float(defined @ (defined.sum() - defined)))
    groups = [_against_rest(*_with_direction(rows)) for rows in group_sketches_gWk]
    return Consensus(
        num_directions=count,
        cosine_mean=mean,
        cosine_weighted=weighted,
        cosine_rest_W=_against_rest(rows_WK, norms_W),
        group_cosine_rest_Wg=np.array(groups).reshape(len(groups), len(norms_W)).T,
    )


def step_values(consensus: Consensus) -> dict[str, float]:
    """Return the directions' columns of the steps table.

    ``cosine_min``, which takes pairs, is NaN here.

    Example:
        >>> sketches_WK = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
        >>> step_values(consensus_of(sketches_WK, np.empty((0, 3, 2))))
        {'cosine_mean': 1.0, 'cosine_weighted': 1.0, 'cosine_min': nan, 'directions_undefined': 1.0}
    """
    num_workers = len(consensus.cosine_rest_W)
    return {
        "cosine_mean": consensus.cosine_mean,
        "cosine_weighted": consensus.cosine_weighted,
        "cosine_min": float("nan"),
        "directions_undefined": float(num_workers - consensus.num_directions),
    }


def _with_direction(rows_WK: Floats) -> tuple[Floats, Floats]:
    """Return rows and their norms, zeros for rows without a direction."""
    rows = np.asarray(rows_WK, np.float64)
    norms_W = np.sqrt(np.einsum("wk,wk->w", rows, rows))
    broken_W = ~np.isfinite(norms_W)
    if broken_W.any():
        rows = np.where(broken_W[:, None], 0.0, rows)
        norms_W = np.where(broken_W, 0.0, norms_W)
    return rows, norms_W


def _against_rest(rows_WK: Floats, norms_W: Floats) -> Floats:
    """Return cosines between rows and the sum of all others ``[W]``; NaN where one vanishes."""
    total_K = rows_WK.sum(axis=0)
    squares_W = norms_W**2
    own_W = rows_WK @ total_K
    total = float(total_K @ total_K)
    products_W = own_W - squares_W
    rests_W = total - 2.0 * own_W + squares_W
    for i in np.flatnonzero(rests_W < _DROWNED * (np.sqrt(total) + norms_W) ** 2):
        rest_K = total_K - rows_WK[i]  # number by number, so that squares do not cancel
        products_W[i] = rows_WK[i] @ rest_K
        rests_W[i] = rest_K @ rest_K
    least_W = _LOST**2 * (squares_W.sum() - squares_W)
    known_W = (norms_W > 0) & (rests_W > least_W)
    below_W = np.where(known_W, norms_W * np.sqrt(np.maximum(rests_W, 0.0)), np.nan)
    return _snap(products_W / below_W)


@functools.lru_cache(maxsize=16)
def _signs(count: int) -> Floats32:
    """Return ±1 for each entry of a sketch, the same on every host."""
    highest_bits = mix(np.arange(1, count + 1)) >> np.uint64(63)
    signs = (1.0 - 2.0 * highest_bits.astype(np.float32)).astype(np.float32)
    signs.flags.writeable = False
    return signs

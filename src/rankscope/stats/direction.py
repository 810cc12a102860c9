"""Gradient directions, from the Gram matrix of gradients or of their sketches.

Legend of shapes: W workers, K numbers per gradient (or per linear sketch of it).

A zero or non-finite gradient has no direction. Its cosines are NaN and every mean leaves them out.
"""

import functools
import math

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.arrays import Floats, Ints

ROUNDING = 1e-12
"""Cosines closer than this to ±1 are ±1: what float64 sums of a few thousand products can lose."""

DROWNED = 1e-3
"""A sum of float32 gradients this much shorter than its parts is lost in their rounding."""


def gram(sketches_WK: NDArray[np.floating]) -> Floats:
    """Return all inner products ``G_ij = g_i · g_j``.

    Args:
        sketches_WK: One gradient or sketch per worker ``[..., W, K]``, for one or more sets of
            them; float32 of any magnitude is safe, since the products are taken in float64.

    Returns:
        Symmetric ``[..., W, W]``; rows and columns of workers with an infinity or NaN are NaN.

    Example:
        >>> gram(np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 4.0]])).tolist()
        [[1.0, 0.0, 3.0], [0.0, 4.0, 8.0], [3.0, 8.0, 25.0]]
    """
    rows_WK: Floats = np.asarray(sketches_WK, np.float64, order="C")
    with np.errstate(over="ignore", invalid="ignore"):
        products_WW: Floats = rows_WK @ rows_WK.swapaxes(-1, -2)
    if np.isfinite(products_WW.diagonal(0, -2, -1)).all():  # so are all numbers
        return products_WW
    finite_W: NDArray[np.bool_] = np.asarray(np.isfinite(rows_WK).all(axis=-1))
    if finite_W.all():
        return products_WW
    rows_WK = np.where(finite_W[..., None], rows_WK, 0.0)
    gram_WW: Floats = rows_WK @ rows_WK.swapaxes(-1, -2)
    gram_WW[~(finite_W[..., :, None] & finite_W[..., None, :])] = np.nan
    return gram_WW


def has_direction(gram_WW: Floats) -> NDArray[np.bool_]:
    """Return for each worker ``[..., W]`` whether its gradient is finite and not zero.

    Example:
        >>> has_direction(gram(np.array([[1.0, 0.0], [0.0, 0.0], [np.nan, 1.0]]))).tolist()
        [True, False, False]
    """
    squares_W = gram_WW.diagonal(0, -2, -1)
    return np.isfinite(squares_W) & (squares_W > 0)


def cosines_from_gram(gram_WW: Floats) -> Floats:
    """Return ``cos(g_i, g_j) = G_ij / sqrt(G_ii G_jj)``.

    Returns:
        Symmetric ``[W, W]`` in [-1, 1] with 1 on the diagonal. Identical gradients give exactly
        1. Rows and columns of workers without a direction are NaN, the diagonal too.

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

    ``Σ_{i≠j} g_i·g_j = W²‖ḡ‖² − Σ‖g_i‖²``, so it is exact when ``ḡ`` is the exact mean.

    Args:
        norms_W: L2 norms of the local gradients ``[W]``.
        mean_gradient_norm: L2 norm of their mean.

    Returns:
        A value in [-1, 1]; NaN when a norm is not finite or fewer than two are positive.

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
    """Return ``cos(g_i, Σ_{j≠i} g_j)``: how far each worker points where the others point.

    The sums run over workers with a direction. They leave worker i out from the start rather
    than subtract it, so that a worker with a huge norm does not drown the others.

    Args:
        gram_WW: Inner products ``[..., W, W]`` of one or more sets of gradients.

    Returns:
        ``[..., W]``; NaN for a worker without a direction, or when the others' sum vanishes.

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


def leave_one_out_from_mean(
    norms_W: Floats, mean_gradient_norm: float, products_W: Floats
) -> Floats:
    """Return ``cos(g_i, Σ_{j≠i} g_j)`` without any pair, from numbers that each worker has itself.

    ``g_i·Σ_{j≠i} g_j = W g_i·ḡ − ‖g_i‖²`` and
    ``‖Σ_{j≠i} g_j‖² = W²‖ḡ‖² − 2W g_i·ḡ + ‖g_i‖²``, so it is exact when ``ḡ`` is the exact mean.
    For two workers norms alone suffice: it is the cosine of the pair.

    Args:
        norms_W: L2 norms of the local gradients ``[W]``.
        mean_gradient_norm: L2 norm of their mean.
        products_W: Inner product of each with their mean ``[W]``; NaN where it is unknown.

    Returns:
        ``[W]``; NaN for a worker whose numbers are unknown or not finite, without a direction, or
        beside which the others' sum drowns: shorter than :data:`DROWNED` of both lengths.

    Example:
        >>> gradients_WK = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [4.0, 3.0]])
        >>> norms_W, mean_K = np.linalg.norm(gradients_WK, axis=1), gradients_WK.mean(axis=0)
        >>> leave_one_out_from_mean(norms_W, np.linalg.norm(mean_K), gradients_WK @ mean_K).round(3)
        array([0.894, 0.894, 0.894, 0.8  ])
    """
    num_workers = len(norms_W)
    if num_workers == 2:
        return np.full(2, norm_weighted_cosine_from_mean(norms_W, mean_gradient_norm))
    numbers_W = norms_W + products_W + mean_gradient_norm
    known_W = np.isfinite(numbers_W) & (norms_W > 0)
    own_W = np.where(known_W, norms_W, np.nan)
    scale_W = np.maximum(own_W, num_workers * mean_gradient_norm)
    own_W = own_W / scale_W
    total_W = num_workers * mean_gradient_norm / scale_W
    products_W = num_workers * products_W / scale_W**2
    rest_squares_W = total_W**2 - 2.0 * products_W + own_W**2
    drowned_W = ~(rest_squares_W > (DROWNED * (total_W + own_W)) ** 2)
    rest_W = np.sqrt(np.where(drowned_W, np.nan, rest_squares_W))
    return np.clip((products_W - own_W**2) / own_W / rest_W, -1.0, 1.0)


def upper_triangle(cosines_WW: Floats) -> Floats:
    """Return the pairs i < j row by row, ``[W(W−1)/2]``.

    Example:
        >>> upper_triangle(np.array([[1.0, 0.5, 0.2], [0.5, 1.0, 0.1], [0.2, 0.1, 1.0]])).tolist()
        [0.5, 0.2, 0.1]
    """
    return cosines_WW.take(_pairs(len(cosines_WW))[0])


def from_upper_triangle(values: NDArray[np.floating], num_workers: int) -> Floats:
    """Return the symmetric ``[W, W]`` matrix whose pairs i < j are ``values``, row by row.

    The diagonal is 1, and NaN for a worker none of whose pairs is defined.

    Raises:
        ValueError: ``values`` are not W(W−1)/2 numbers.

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
    """Return for each i the sum of a symmetric matrix without its row and column i.

    Adds the three blocks beside row and column i (above left, below right, and twice above
    right), each a corner of a two-dimensional running sum: O(W²), and nothing is subtracted.

    ``matrices_WW``: one or more of them ``[..., W, W]``.
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

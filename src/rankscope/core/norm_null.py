"""The dispersion of gradient norms that sampling alone would give, from micro-batches.

A worker's gradient is the mean of M micro-batches: ``g = Σ_m g_m / M``. Of each of these the norm
``a_m`` is known, and of each pair of workers the product ``P_ij = g_i·g_j``. Two things make the
norms of workers differ that draw from one distribution.

**How long the gradients of micro-batches are.** On text this is most of it, with heavy tails: some
micro-batches have several times the norm of others. With ``Q`` the mean of ``a_m²`` and ``C`` the
mean of ``a_m·a_l`` (m ≠ l) over a worker's micro-batches, and ``C̄`` the mean of C over workers,

    ‖g‖² = Q/M + (1 − 1/M)·k·(1 + γ(C/C̄ − 1)),

where ``k``, the mean product of two micro-batches of one worker, follows from the norms of workers
and micro-batches. ``γ`` tells whether a longer gradient also agrees more with the others (1: all
of it is longer; 0: only its noise is), and is the slope of the products ``P_ij`` over the workers'
mean norm of micro-batches. All norms of a worker are divided by its level, which is what lasts of
them over those of the middle worker. Then the micro-batches are dealt to the workers anew: the
spread of ``‖g‖`` over the workers of such deals is the expected one. No distribution is assumed.

**Where they point.** What the products deviate from ``k·u_i·u_j``, with ``u_i = 1 + γ(ā_i/ā − 1)``,
is a part of each worker (variance ``s``) and a part of each pair (variance ``t``), told apart by
least squares in the symmetric table without its diagonal, of W(W − 3)/2 degrees of freedom.
They add ``4(1 − 1/M)²·s + 2(1 − 1/M)·t`` to the variance of ``‖g‖²``, whatever the spectrum of the
noise: the products inside a worker are those of M(M − 1)/2 pairs of micro-batches, those between
two workers of M².

Legend of shapes: T steps, W workers, M micro-batches of each.
"""

import numpy as np
from numpy.typing import NDArray

from rankscope.core.arrays import Floats

MIN_WORKERS = 4
"""Fewer have no degree of freedom to tell a pair's part from its workers' parts."""

BLOCK = 32
"""Steps in which a worker's level, γ, and the variances of directions count as constant."""

DEALS = 8
"""How often the micro-batches of a step are dealt anew."""

_EQUAL = 1e-12
"""Up to which workers' norms, all squared relative to the whole, count as equal."""


def stds_of_norms(micro_TWM: Floats, norms_TW: Floats, cosines_TWW: Floats) -> Floats:
    """Return the std of gradient norms over workers (ddof 0) that sampling alone would give.

    It lies within some ten per cent of the true one for normal noise and for noise with heavy
    tails. What lasts of a worker's level, since its gradient is scaled or its data are of another
    kind, does not count as chance; of what changes within 32 steps at most 1/M does, as variance.

    Args:
        micro_TWM: Norms of the gradients of single micro-batches, in order of steps; M ≥ 2.
        norms_TW: Norms of the workers' gradients, the means of their micro-batches' ones; W ≥ 4.
        cosines_TWW: Their cosines; the diagonal is not read.

    Returns:
        One per step ``[T]``, in the unit of the norms. NaN where a value is not finite, or a
        norm is 0.

    Raises:
        ValueError: Fewer than four workers, or than two micro-batches.

    Example:
        >>> micro_TWMK = np.random.default_rng(0).normal(size=(32, 8, 4, 20))  # nothing but noise
        >>> gradients_TWK = micro_TWMK.mean(axis=2)
        >>> micro_TWM, norms_TW = (np.linalg.norm(g, axis=-1) for g in (micro_TWMK, gradients_TWK))
        >>> units_TWK = gradients_TWK / norms_TW[:, :, None]
        >>> expected_T = stds_of_norms(micro_TWM, norms_TW, units_TWK @ units_TWK.swapaxes(1, 2))
        >>> float(expected_T.mean().round(2)), float(norms_TW.std(axis=1).mean().round(2))
        (0.33, 0.34)
    """
    num_workers, num_micro = micro_TWM.shape[1:]
    if num_workers < MIN_WORKERS or num_micro < 2:
        raise ValueError(f"expected W ≥ 4 and M ≥ 2, got W={num_workers} and M={num_micro}")
    apart = _apart(num_workers)
    every_TWN = np.concatenate([micro_TWM, norms_TW[:, :, None]], axis=2)
    known_T = (np.isfinite(every_TWN) & (every_TWN > 0)).all(axis=(1, 2))
    known_T &= np.isfinite(cosines_TWW[:, apart]).all(axis=1)
    steps = np.flatnonzero(known_T)
    stds_T = np.full(len(norms_TW), np.nan)
    draws = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        for first in range(0, len(steps), BLOCK):
            at = steps[first : first + BLOCK]
            stds_T[at] = _block(micro_TWM[at], norms_TW[at], cosines_TWW[at], draws)
    return stds_T


def _block(
    micro_TWM: Floats, norms_TW: Floats, cosines_TWW: Floats, draws: np.random.Generator
) -> Floats:
    """Return the expected stds of a few steps, all of whose values are known."""
    num_workers, num_micro = micro_TWM.shape[1:]
    micro_TWM, norms_TW = _without_levels(micro_TWM, norms_TW)
    largest_T = norms_TW.max(axis=1)
    sizes_T = largest_T * np.sqrt(np.square(norms_TW / largest_T[:, None]).mean(axis=1))
    micro_TWM, norms_TW = micro_TWM / sizes_T[:, None, None], norms_TW / sizes_T[:, None]
    products_TWW = cosines_TWW * norms_TW[:, :, None] * norms_TW[:, None, :]
    slope, own, paired = _directions(products_TWW, micro_TWM.mean(axis=2))
    share = 1 - 1 / num_micro
    from_directions = share**2 * own + share * paired / 2  # of ‖g‖, by d‖g‖² = 2‖g‖ d‖g‖
    cross_TW = np.square(norms_TW) - np.square(micro_TWM).sum(axis=2) / num_micro**2
    inside_T = np.maximum(cross_TW.mean(axis=1) / share, 0.0)
    variance_T = _dealt(_unbiased(micro_TWM), inside_T, slope, draws) + from_directions
    return np.asarray(sizes_T * np.sqrt((num_workers - 1) / num_workers * variance_T))


def _without_levels(micro_TWM: Floats, norms_TW: Floats) -> tuple[Floats, Floats]:
    """Return norms divided by each worker's level: its own over that of the middle worker."""
    logs_TWM = np.log(micro_TWM)
    levels_W = (logs_TWM - logs_TWM.mean(axis=(1, 2), keepdims=True)).mean(axis=(0, 2))
    factors_W = np.exp(np.median(levels_W) - levels_W)
    return micro_TWM * factors_W[:, None], norms_TW * factors_W


def _unbiased(micro_TWM: Floats) -> Floats:
    """Return the norms, farther apart by what they lost when their worker's level was removed."""
    count = micro_TWM.shape[0] * micro_TWM.shape[2]
    logs_TWM = np.log(micro_TWM)
    means_TWM = logs_TWM.mean(axis=(1, 2), keepdims=True)
    return np.asarray(np.exp(means_TWM + (logs_TWM - means_TWM) * np.sqrt(count / (count - 1))))


def _directions(products_TWW: Floats, lengths_TW: Floats) -> tuple[float, float, float]:
    """Return γ, and the variances of a worker's and of a pair's part in the products."""
    width = products_TWW.shape[1]
    apart = _apart(width)
    means_T, parts_TW = _parts(products_TWW, apart)
    longer_TW = lengths_TW / lengths_TW.mean(axis=1, keepdims=True) - 1
    with_length_TW = means_T[:, None] * longer_TW
    known = float(np.sum(with_length_TW**2))
    slope = float(np.sum(with_length_TW * parts_TW)) / known if known > _EQUAL else 1.0
    slope = min(max(slope, 0.0), 1.0)
    factors_TW = 1 + slope * longer_TW
    model_TWW = means_T[:, None, None] * factors_TW[:, :, None] * factors_TW[:, None, :]
    left_TWW = products_TWW - model_TWW
    means_T, parts_TW = _parts(left_TWW, apart)
    fit_TWW = means_T[:, None, None] + parts_TW[:, :, None] + parts_TW[:, None, :]
    paired = float(np.mean(np.square(left_TWW - fit_TWW)[:, apart])) * (width - 1) / (width - 3)
    own = float(np.mean(np.square(parts_TW))) * width / (width - 1) - paired / (width - 2)
    return slope, max(own, 0.0), paired


def _parts(values_TWW: Floats, apart: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return the mean of all pairs ``[T]`` and each worker's part ``[T, W]``: least squares."""
    width = len(apart)
    of_workers_TW = np.where(apart, values_TWW, 0.0).sum(axis=2) / (width - 1)
    means_T = of_workers_TW.mean(axis=1)
    return means_T, (of_workers_TW - means_T[:, None]) * (width - 1) / (width - 2)


def _apart(width: int) -> NDArray[np.bool_]:
    """Return which entries ``[W, W]`` are pairs of two workers."""
    return np.asarray(~np.eye(width, dtype=np.bool_))


def _dealt(micro_TWM: Floats, inside_T: Floats, slope: float, draws: np.random.Generator) -> Floats:
    """Return the variance of ``‖g‖`` over workers that are dealt these micro-batches anew."""
    num_steps, _, num_micro = micro_TWM.shape
    share = 1 - 1 / num_micro
    variances_T = np.zeros(num_steps)
    for _ in range(DEALS):
        dealt_TWM = draws.permuted(micro_TWM.reshape(num_steps, -1), axis=1)
        dealt_TWM = dealt_TWM.reshape(micro_TWM.shape)
        squares_TW = np.square(dealt_TWM).sum(axis=2)
        cross_TW = np.square(dealt_TWM.sum(axis=2)) - squares_TW
        factors_TW = 1 + slope * (cross_TW / cross_TW.mean(axis=1, keepdims=True) - 1)
        norms_TW = np.sqrt(squares_TW / num_micro**2 + share * inside_T[:, None] * factors_TW)
        variances_T += norms_TW.var(axis=1, ddof=1) / DEALS
    return variances_T

"""Noise of gradients from norms alone: within workers, between workers, and the noise scale.

A gradient over n units (micro-batches, or workers) is the true gradient G plus noise, whose
expected square falls as 1/n. From the mean square of single units, ``a``, and the square ``b`` of
the mean of all n of them follow, without bias,

    noise of a unit  tr Σ = (n·a − n·b) / (n − 1),     |G|² = (n·b − a) / (n − 1),

which is appendix A.1 of McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch
Training", 2018 (arXiv 1812.06162) with batches of 1 and n units. Their *simple noise scale* ``tr Σ
/ |G|²`` is the batch, in units, at which noise and gradient are equally long.

With one gradient per worker, the norm-weighted mean cosine follows from ``a`` and ``b`` alone: with
equal norms, cosine c and noise scale are ``(1 − c)/c`` of each other, and shared data give noise 0.
Only the micro-batches inside a worker show the true noise.

Noise and signal count all units alike. The noise within workers uses the shares ``w_j`` that
micro-batches have in their worker's gradient, which are their multipliers over the sum of these.
Where every worker has the same sum (each divides by its own label tokens), ``h_j = w_j g_j`` and
``s = Σ w_j²`` give the noise of a worker's gradient ``g = Σ h_j`` without bias,

    tr Σ of a worker = (Σ ‖h_j‖² − s ‖g‖²) / (1 − s),

whatever the noise of each micro-batch; ``s`` is 1/M for equal shares. Squares and ``s`` are
averaged over workers first. Where the sums differ (all divide by the tokens of all workers), the
length of a worker's gradient is proportional to its tokens, *within* and *between* grow alike, and
their ratio is right with equal shares.

Ratios of sums over the steps of a run have an interval. The sums run over blocks of consecutive
steps. The spread of the ratio when one block is left out (the jackknife: Quenouille; Tukey; Busing,
Meijer and van der Leeden, 1999) shows its uncertainty, and blocks of many steps also cover the
correlation of neighbouring steps.

Legend of shapes: T steps, B blocks, W workers, M micro-batches of each.
"""

import math
from dataclasses import dataclass

import numpy as np

from rankscope.stats.arrays import Bools, Floats, Ints

MOST_BLOCKS = 64
LEAST_BLOCKS = 8
"""Fewest blocks for an interval."""

_NORMAL_975 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio and its uncertainty."""

    value: float  # the ratio; NaN when its denominator is not positive
    low: float = math.nan  # lower end of the 95 % confidence interval; NaN when unknown
    high: float = math.nan


def block_sums(numerators_T: Floats, denominators_T: Floats) -> Floats:
    """Return the sums of two quantities over blocks of consecutive steps ``[B, 2]``.

    Steps that are not finite are left out. Blocks hold a power of two of steps, the fewest that
    give at most 64 whole ones; an unfinished one may follow.

    Example:
        >>> block_sums(np.full(3, 3.0), np.array([2.0, math.nan, 2.0])).tolist()
        [[3.0, 2.0], [3.0, 2.0]]
    """
    pairs_T2 = np.stack([numerators_T, denominators_T], axis=1)
    pairs_T2 = pairs_T2[np.isfinite(pairs_T2).all(axis=1)]
    length = 1
    while len(pairs_T2) // length > MOST_BLOCKS:
        length *= 2
    firsts_B = np.arange(0, len(pairs_T2), length)
    sums_B2: Floats = np.add.reduceat(pairs_T2, firsts_B, axis=0) if len(firsts_B) else pairs_T2
    return sums_B2


def ratio_of_sums(sums_B2: Floats, *, root: bool = False) -> Estimate:
    """Return ``Σ numerator / Σ denominator`` over blocks ``[B, 2]`` with a jackknife interval.

    ``root`` takes the square root of the ratio; a negative ratio counts as 0.

    Example:
        >>> ratio_of_sums(np.array([[2.0, 1.0], [6.0, 1.0]]), root=True).value
        2.0
    """
    total = sums_B2.sum(axis=0)
    if not total[1] > 0:
        return Estimate(math.nan)
    value = float(_ratio(total, root=root))
    count = len(sums_B2)
    rest_B2 = total - sums_B2
    if count < LEAST_BLOCKS or not (rest_B2[:, 1] > 0).all():
        return Estimate(value)
    left_out_B = _ratio(rest_B2, root=root)
    error = math.sqrt((count - 1) / count * float(np.sum((left_out_B - left_out_B.mean()) ** 2)))
    reach = student_975(count - 1) * error
    low = max(value - reach, 0.0) if root else value - reach
    return Estimate(value, low, value + reach)


def student_975(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t, by an expansion around the normal one.

    Abramowitz and Stegun, 26.7.5; right to 0.01 from 4 degrees of freedom on.

    Example:
        >>> round(student_975(10), 2)
        2.23
    """
    z = _NORMAL_975
    n = degrees
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def _ratio(sums: Floats, *, root: bool) -> Floats:
    ratios: Floats = sums[..., 0] / sums[..., 1]
    return np.sqrt(np.maximum(ratios, 0.0)) if root else ratios


@dataclass(frozen=True, slots=True)
class NoiseOfSteps:
    """The noise of gradients in T steps, from norms; NaN where unknown."""

    between_T: Floats  # variance of the workers' gradients around their mean (trace, unbiased)
    within_T: Floats  # the same as their micro-batches predict it, whatever the workers share
    noise_T: Floats  # tr Σ of one unit: of a micro-batch where these are known, else of a worker
    signal_T: Floats  # |G|², without bias, so possibly negative in a single step
    units_T: Ints  # how many units the reduced gradient averages

    def at(self, chosen_T: Bools) -> "NoiseOfSteps":
        """Return the chosen steps."""
        return NoiseOfSteps(
            self.between_T[chosen_T],
            self.within_T[chosen_T],
            self.noise_T[chosen_T],
            self.signal_T[chosen_T],
            self.units_T[chosen_T],
        )


def noise_of_steps(
    squares_T: Floats,
    reduced_norms_T: Floats,
    micro_squares_T: Floats,
    num_micro_T: Ints,
    shares_T: Floats,
    width: int,
) -> NoiseOfSteps:
    """Return the noise of many steps.

    Given are means over workers: of the squared norm of the gradient, and of the sum of the squared
    norms of its micro-batches; the norm of the workers' mean gradient; M, 1 where it is unknown or
    workers differ in it; s from :func:`micro_shares`, NaN where unknown; and W.

    Example:
        >>> unknown, one = np.array([math.nan]), np.array([1])
        >>> of = noise_of_steps(np.array([5.0]), np.sqrt([3.0]), unknown, one, unknown, width=2)
        >>> of.noise_T.round(6).tolist(), of.signal_T.round(6).tolist()  # 2(5 − 3) and 2·3 − 5
        ([4.0], [1.0])
    """
    with np.errstate(all="ignore"):
        reduced_T = reduced_norms_T * reduced_norms_T
        unknown_T = np.full(len(squares_T), math.nan)
        between_T = unknown_T
        signal_T = unknown_T
        if width > 1:
            between_T, signal_T = _split(squares_T, reduced_T, width)
        mean_squares_T = micro_squares_T / num_micro_T
        within_T = (mean_squares_T / num_micro_T - shares_T * squares_T) / (1 - shares_T)
        finer_T = (num_micro_T >= 2) & ~np.isnan(mean_squares_T)
        units_T = np.where(finer_T, width * num_micro_T, width)
        fine_T, fine_signal_T = _split(mean_squares_T, reduced_T, units_T)
        return NoiseOfSteps(
            between_T,
            np.where(finer_T, within_T, math.nan),
            np.where(finer_T, fine_T, between_T),
            np.where(finer_T, fine_signal_T, signal_T),
            units_T,
        )


def micro_shares(sums_TW: Floats, squares_TW: Floats, num_micro_T: Ints) -> Floats:
    """Return s, the sum of the squared shares of micro-batches in a worker's gradient, ``[T]``.

    Given are the sum of the multipliers of each worker's micro-batches, that of their squares, and
    M, 1 where workers differ in it. s is a mean over workers, from 1/M to below 1; 1/M where the
    workers' sums differ. NaN where a multiplier is unknown, where a worker's are 0 in all, and
    without accumulation.

    Example:
        >>> scales_WM = np.array([[0.5, 0.5], [0.9, 0.1]])
        >>> sums, squares = scales_WM.sum(axis=1), np.square(scales_WM).sum(axis=1)
        >>> micro_shares(sums[None], squares[None], np.array([2])).round(6).tolist()
        [0.66]
    """
    with np.errstate(all="ignore"):
        own_TW = squares_TW / np.square(sums_TW)
        sizes_TW = np.abs(sums_TW)
        largest_T = sizes_TW.max(axis=1)
        alike_T = largest_T - sizes_TW.min(axis=1) <= _EQUAL * largest_T
        shares_T = np.where(alike_T, own_TW.mean(axis=1), 1 / num_micro_T)
        known_T = np.isfinite(own_TW).all(axis=1) & (num_micro_T >= 2) & (shares_T < 1)
    return np.where(known_T, shares_T, math.nan)


def noise_scale(inverse: Estimate) -> Estimate:
    """Return noise over signal, given signal over noise.

    The signal may be hidden in noise; its inverse would then have no finite interval. So the
    interval is that of signal over noise, turned round: without an upper end when the signal may
    be 0.

    Example:
        >>> noise_scale(Estimate(0.25, low=0.125, high=0.5))
        Estimate(value=4.0, low=2.0, high=8.0)
    """
    low = inverse.low
    high = inverse.high
    return Estimate(
        value=1 / inverse.value if inverse.value > 0 else math.inf,
        low=_turned(high),
        high=math.inf if low <= 0 else _turned(low),
    )


_EQUAL = 1e-3
"""Multipliers whose sums differ by less, relative to the largest, are the same but for rounding."""


def _split(one: Floats, mean_of_all: Floats, count: Ints | int) -> tuple[Floats, Floats]:
    """Return noise and signal from the mean square of a unit and the square of the mean."""
    noise = count * (one - mean_of_all) / (count - 1)
    return noise, (count * mean_of_all - one) / (count - 1)


def _turned(value: float) -> float:
    return 1 / value if value > 0 else value if math.isnan(value) else math.inf

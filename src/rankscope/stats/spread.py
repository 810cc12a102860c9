"""The spread of one number over workers, and the spread that sampling alone would give.

Values that are not finite are left out; without any finite value the result is NaN. Spreads are
population standard deviations (ddof 0). Equal values have a spread of exactly 0, and values near
the end of the float64 range do not overflow.

A worker's loss is a mean over samples or micro-batches ("units"). The spread between the units
of one worker gives the spread of means of such units by chance. The ratio of observed to expected
dispersion is then about 1 when the workers draw from the same distribution, near 0 when they share
data, and above 1 when their data differ in kind.
"""

import math

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.arrays import Floats, Ints
from rankscope.stats.ragged import Ragged


def finite_mean(values_W: NDArray[np.floating]) -> float:
    """Return the mean of the finite values, in their unit.

    Example:
        >>> finite_mean(np.array([1.0, 3.0, np.nan]))
        2.0
    """
    return mean_and_std(values_W)[0]


def population_std(values_W: NDArray[np.floating]) -> float:
    """Return ``sqrt(mean((x − mean(x))²))`` of the finite values, in their unit.

    Example:
        >>> population_std(np.array([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]))  # of eight workers
        2.0
    """
    return mean_and_std(values_W)[1]


def mean_and_std(values_W: NDArray[np.floating]) -> tuple[float, float]:
    """Return :func:`finite_mean` and :func:`population_std` together.

    Example:
        >>> mean_and_std(np.array([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]))
        (5.0, 2.0)
    """
    scaled, exponent = _scaled(values_W)
    count = len(scaled)
    if not count:
        return math.nan, math.nan
    from_first = scaled - scaled[0]
    mean = from_first.sum() / count
    from_mean = from_first - mean
    std = np.sqrt((from_mean * from_mean).sum() / count)
    return float(np.ldexp(scaled[0] + mean, exponent)), float(np.ldexp(std, exponent))


def value_range(values_W: NDArray[np.floating]) -> float:
    """Return the largest minus the smallest finite value, in their unit; inf if it overflows.

    Example:
        >>> value_range(np.array([2.0, 5.0, np.inf]))
        3.0
    """
    finite = _finite(values_W)
    return float(finite.max()) - float(finite.min()) if finite.size else math.nan


def _scaled(values: NDArray[np.floating]) -> tuple[Floats, int]:
    """Return the finite values times a power of two that brings them into [-1, 1]."""
    finite = _finite(values)
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    exponent = math.frexp(largest)[1]
    return np.ldexp(finite, -exponent), exponent


def _finite(values: NDArray[np.floating]) -> Floats:
    wide: Floats = np.asarray(values, np.float64)
    return wide[np.isfinite(wide)]


def weighted_means_and_sems(
    values_U: NDArray[np.floating], weights_U: NDArray[np.floating], lengths_W: Ints
) -> tuple[Floats, Floats]:
    """Return the loss of each worker per label token, and its standard error.

    With shares ``h = w / Σ w`` the mean is ``Σ h v`` and ``sem² = Σ h² (v − mean)² / (1 − h)``.
    The factor ``1/(1 − h)`` undoes that each unit pulls the mean towards itself: the estimate is
    unbiased when a unit's variance is inversely proportional to its tokens, and is the usual one,
    ``s²/b``, when all weights are equal. (Dividing by ``(b−1)/b`` throughout is too small when
    one long sample dominates a batch.)

    Args:
        values_U: Loss of each unit of all workers, one worker after the other ``[U]``.
        weights_U: Label tokens of each unit ``[U]``. Units of weight 0 are left out, whatever
            their value. When any weight of a worker is NaN (unknown), all its units count alike.
        lengths_W: How many units each worker has.

    Returns:
        Means and standard errors ``[W]``, in the unit of the values. The standard error is NaN
        with fewer than two units of positive weight; both are NaN without any, or when a weight is
        negative or infinite. A unit that is not finite makes the mean so too.

    Raises:
        ValueError: Different numbers of values and weights.

    Example:
        >>> values, weights = np.array([1.0, 3.0, 5.0]), np.array([1.0, 1.0, 8.0])
        >>> means, sems = weighted_means_and_sems(values, weights, np.array([2, 1]))
        >>> means.tolist(), sems.tolist()
        ([2.0, 5.0], [1.0, nan])
    """
    values = np.asarray(values_U, np.float64)
    weights = np.asarray(weights_U, np.float64)
    if values.shape != weights.shape:
        raise ValueError(f"expected one weight per value, got {weights.shape} for {values.shape}")
    units = Ragged(values, lengths_W), Ragged(weights, lengths_W)
    if not ((weights > 0) & (weights < np.inf)).all():
        units = _counted(*units)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return _means_and_sems(*units)


def _counted(values: Ragged, weights: Ragged) -> tuple[Ragged, Ragged]:
    """Return the units that count, and their weights."""
    lengths_W = weights.lengths_R
    unknown_W = Ragged(np.isnan(weights.flat), lengths_W).reduced(np.logical_or, False)
    known_U = np.where(weights.spread(unknown_W), 1.0, weights.flat)
    usable_U = (known_U >= 0) & np.isfinite(known_U)
    usable_W = Ragged(usable_U, lengths_W).reduced(np.logical_and, True)
    counts_U = weights.spread(usable_W) & (known_U > 0)
    return values.where(counts_U), Ragged(known_U, lengths_W).where(counts_U)


def _means_and_sems(values: Ragged, weights: Ragged) -> tuple[Floats, Floats]:
    """Return the same for positive weights."""
    lengths_W = values.lengths_R
    some_W = lengths_W > 0
    first_W = np.full(len(values), np.nan)
    first_W[some_W] = values.flat[values.firsts[some_W]]
    shares_U = weights.flat / weights.spread(weights.reduced(np.add, 0.0))
    above_U = shares_U * (values.flat - values.spread(first_W))
    mean_W = first_W + Ragged(above_U, lengths_W).reduced(np.add, 0.0)
    sem_W = _sems(shares_U, Ragged(values.flat - values.spread(mean_W), lengths_W))
    odd_U = ~np.isfinite(values.flat)
    if odd_U.any():
        odd = values.where(odd_U)
        odd_W = odd.lengths_R > 0
        mean_W[odd_W] = odd.reduced(np.add, 0.0)[odd_W]  # inf or -inf if only that occurs, else NaN
        sem_W[odd_W] = np.nan
    return mean_W, sem_W


def _sems(shares_U: Floats, deviations: Ragged) -> Floats:
    lengths_W = deviations.lengths_R
    largest_W = Ragged(np.abs(deviations.flat), lengths_W).reduced(np.maximum, 0.0)
    rest_U = 1 - shares_U
    scaled_U = shares_U * (deviations.flat / deviations.spread(largest_W))
    # a unit with all the weight, to rounding, deviates from itself by nothing
    terms_U = np.where(rest_U > 0, scaled_U**2 / rest_U, 0.0)
    sem_W: Floats = largest_W * np.sqrt(Ragged(terms_U, lengths_W).reduced(np.add, 0.0))
    sem_W[largest_W == 0.0] = 0.0
    return np.where(lengths_W < 2, np.nan, sem_W)


def expected_std(sems_W: NDArray[np.floating]) -> float:
    """Return the loss std over workers (ddof 0) that sampling alone would give.

    The expected population variance of W independent values with standard errors ``s_i`` and one
    true mean is ``(W−1)/W · mean(s²)``.

    Args:
        sems_W: Standard error of each worker's loss ``[W]``; those not finite are left out.

    Returns:
        The root of it, in the unit of the losses; NaN with fewer than two finite values.

    Example:
        >>> round(expected_std(np.array([2.0, 2.0, 2.0, 2.0])), 6)  # √(3/4 · 2²)
        1.732051
    """
    sems = np.asarray(sems_W, np.float64)
    sems = sems[np.isfinite(sems)]
    if len(sems) < 2:
        return float("nan")
    largest = float(sems.max()) or 1.0
    mean_square = float(np.mean((sems / largest) ** 2))
    return largest * float(np.sqrt((len(sems) - 1) / len(sems) * mean_square))

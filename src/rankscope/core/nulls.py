"""What sampling alone explains: the dispersion that workers with different data would show.

A worker's loss is a mean over samples or micro-batches ("units"). The spread between the units
of one worker tells how far means of such units would lie apart by chance. The ratio of observed
to expected dispersion is then about 1 when the workers draw from the same distribution, near 0
when they share data, and above 1 when their data differ in kind.
"""

import numpy as np
from numpy.typing import NDArray

from rankscope.core.arrays import Floats


def weighted_mean_and_sem(
    values_U: NDArray[np.floating], weights_U: NDArray[np.floating]
) -> tuple[float, float]:
    """Return the loss of one worker per label token, and its standard error.

    With shares ``h = w / Σ w`` the mean is ``Σ h v`` and ``sem² = Σ h² (v − mean)² / (1 − h)``.
    The factor ``1/(1 − h)`` undoes that each unit pulls the mean towards itself: the estimate is
    unbiased when a unit's variance is inversely proportional to its tokens, and is the usual one,
    ``s²/b``, when all weights are equal. (Dividing by ``(b−1)/b`` throughout is too small when
    one long sample dominates a batch.)

    Args:
        values_U: Loss of each unit ``[U]``.
        weights_U: Label tokens of each unit ``[U]``. Units of weight 0 are left out, whatever
            their value. When any weight is NaN (unknown), all units count alike.

    Returns:
        Mean and standard error, in the unit of the values. The standard error is NaN with fewer
        than two units of positive weight; both are NaN without any, or when a weight is negative
        or infinite. A unit that is not finite makes the mean so too.

    Raises:
        ValueError: Different numbers of values and weights.

    Example:
        >>> weighted_mean_and_sem(np.array([1.0, 3.0]), np.array([1.0, 1.0]))
        (2.0, 1.0)
    """
    values = np.asarray(values_U, np.float64)
    weights = np.asarray(weights_U, np.float64)
    if values.shape != weights.shape:
        raise ValueError(f"expected one weight per value, got {weights.shape} for {values.shape}")
    if np.isnan(weights).any():
        weights = np.ones_like(values)
    usable = bool(np.all(weights >= 0) and np.isfinite(weights).all())
    values, weights = values[weights > 0], weights[weights > 0]
    if not usable or not len(values):
        return float("nan"), float("nan")
    if not np.isfinite(values).all():
        return _sum_non_finite(values), float("nan")
    shares = weights / weights.sum()
    mean = values[0] + float(np.sum(shares * (values - values[0])))
    return float(mean), _sem(shares, values - mean)


def expected_std(sems_W: NDArray[np.floating]) -> float:
    """Return the loss std over workers (ddof 0) that sampling alone would give.

    The expected population variance of W independent values with standard errors ``s_i`` and one
    true mean is ``(W−1)/W · mean(s²)``.

    Args:
        sems_W: Standard error of each worker's loss ``[W]``; those not finite are left out.

    Returns:
        The root of it, in the unit of the losses; NaN with fewer than two finite values.
    """
    sems = np.asarray(sems_W, np.float64)
    sems = sems[np.isfinite(sems)]
    if len(sems) < 2:
        return float("nan")
    largest = float(sems.max()) or 1.0
    mean_square = float(np.mean((sems / largest) ** 2))
    return largest * float(np.sqrt((len(sems) - 1) / len(sems) * mean_square))


def _sem(shares_U: Floats, deviations_U: Floats) -> float:
    if len(shares_U) < 2:
        return float("nan")
    largest = float(np.max(np.abs(deviations_U)))
    rest_U = 1 - shares_U
    counts = rest_U > 0  # a unit with all the weight, to rounding, deviates from itself by nothing
    if largest == 0.0 or not counts.any():
        return 0.0
    scaled_U = shares_U[counts] * (deviations_U[counts] / largest)
    return largest * float(np.sqrt(np.sum(scaled_U**2 / rest_U[counts])))


def _sum_non_finite(values: Floats) -> float:
    """Return inf or -inf when only that occurs, else NaN, as their sum would."""
    with np.errstate(invalid="ignore"):
        return float(values[~np.isfinite(values)].sum())

"""Friedman's test: do some of several units lie higher than others, step after step?"""

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from rankscope.core.arrays import Floats
from rankscope.core.bets import rank_units

_FEWEST_STEPS = 4


def friedman(values_TU: NDArray[np.floating], level: float) -> tuple[Floats, bool]:
    """Test whether units are alike, by their ranks within each step.

    Friedman, "The use of ranks to avoid the assumption of normality implicit in the analysis of
    variance", 1937; the chi-square quantile after Wilson and Hilferty, 1931.

    Args:
        values_TU: One value per step and unit; steps with a missing one are left out.
        level: Probability with which units that are alike are said to differ.

    Returns:
        How far each unit's mean rank is from the middle ``[U]``, in standard deviations of the
        mean rank of units that are alike; and whether they are alike. With fewer than four steps,
        or two units, nothing says otherwise.
    """
    values = np.asarray(values_TU, np.float64)
    values = values[np.isfinite(values).all(axis=1)]
    num_steps, num_units = values.shape
    if num_steps < _FEWEST_STEPS or num_units < 2:
        return np.zeros(num_units), True
    ranks_TU = rank_units(values).doubled_SU / 2 - (num_units - 1) / 2
    variance = float((ranks_TU**2).mean())
    if variance == 0:
        return np.zeros(num_units), True
    z_U: Floats = ranks_TU.mean(axis=0) * np.sqrt(num_steps / variance)
    freedom = num_units - 1
    statistic = float((z_U**2).sum()) * freedom / num_units
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread)
    return z_U, z < NormalDist().inv_cdf(1 - level)

"""How far workers are apart in one number: mean, spread and range over workers.

Values that are not finite are left out; without any finite value the result is NaN. Spreads are
population standard deviations (ddof 0). Equal values have a spread of exactly 0, and values near
the end of the float64 range do not overflow.
"""

import math

import numpy as np
from numpy.typing import NDArray

from rankscope.core.arrays import Floats


def finite_mean(values_W: NDArray[np.floating]) -> float:
    """Return the mean of the finite values, in their unit."""
    return mean_and_std(values_W)[0]


def population_std(values_W: NDArray[np.floating]) -> float:
    """Return ``sqrt(mean((x − mean(x))²))`` of the finite values, in their unit."""
    return mean_and_std(values_W)[1]


def mean_and_std(values_W: NDArray[np.floating]) -> tuple[float, float]:
    """Return :func:`finite_mean` and :func:`population_std` together."""
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
    """Return the largest minus the smallest finite value, in their unit; inf if it overflows."""
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

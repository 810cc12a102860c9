"""How far workers are apart in one number: mean, spread and range over workers.

Values that are not finite are left out; without any finite value the result is NaN. Spreads are
population standard deviations (ddof 0). Equal values have a spread of exactly 0, and values near
the end of the float64 range do not overflow.
"""

import numpy as np
from numpy.typing import NDArray

from rankscope.core.arrays import Floats


def finite_mean(values_W: NDArray[np.floating]) -> float:
    """Return the mean of the finite values, in their unit."""
    scaled, exponent = _scaled(values_W)
    if not scaled.size:
        return float("nan")
    return float(np.ldexp(scaled[0] + np.mean(scaled - scaled[0]), exponent))


def population_std(values_W: NDArray[np.floating]) -> float:
    """Return ``sqrt(mean((x − mean(x))²))`` of the finite values, in their unit."""
    scaled, exponent = _scaled(values_W)
    if not scaled.size:
        return float("nan")
    return float(np.ldexp(np.std(scaled - scaled[0]), exponent))


def value_range(values_W: NDArray[np.floating]) -> float:
    """Return the largest minus the smallest finite value, in their unit; inf if it overflows."""
    scaled, exponent = _scaled(values_W)
    if not scaled.size:
        return float("nan")
    with np.errstate(over="ignore"):
        return float(np.ldexp(scaled.max() - scaled.min(), exponent))


def _scaled(values: NDArray[np.floating]) -> tuple[Floats, int]:
    """Return the finite values times a power of two that brings them into [-1, 1]."""
    values = np.asarray(values, np.float64)
    finite = values[np.isfinite(values)]
    exponent = int(np.frexp(np.max(np.abs(finite), initial=0.0))[1])
    return np.ldexp(finite, -exponent), exponent

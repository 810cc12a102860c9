"""Ratios of sums over the steps of a run, with an interval.

The sums run over blocks of consecutive steps. The spread of the ratio when one block is left out
(the jackknife: Quenouille; Tukey; Busing, Meijer and van der Leeden, 1999) shows its uncertainty,
and blocks of many steps also cover the correlation of neighbouring steps.
"""

import math
from dataclasses import dataclass

import numpy as np

from rankscope.stats.arrays import Floats

MOST_BLOCKS = 64
LEAST_BLOCKS = 8
"""Fewest blocks for an interval."""

_NORMAL_975 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio and its uncertainty.

    Attributes:
        value: The ratio; NaN when its denominator is not positive.
        low: Lower end of the 95 % confidence interval; NaN when unknown.
        high: Upper end.
    """

    value: float
    low: float = math.nan
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
    """Return ``Σ numerator / Σ denominator`` over blocks with a jackknife interval.

    Args:
        sums_B2: Numerator and denominator of each block.
        root: Whether the square root of the ratio is wanted; a negative ratio counts as 0.

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

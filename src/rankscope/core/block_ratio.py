"""Ratios of sums over a stream of any length, with an interval, in constant memory.

The sums are kept per block of consecutive steps. When there is no room for another block,
neighbours are merged in pairs and blocks become twice as long. The spread of the ratio when one
block is left out (the jackknife: Quenouille; Tukey; Busing, Meijer and van der Leeden, 1999) tells
how uncertain it is, and blocks of many steps also cover what neighbouring steps have in common.
"""

import math
from dataclasses import dataclass

import numpy as np

from rankscope.core.arrays import Floats
from rankscope.core.state import Stateful

CAPACITY = 64
LEAST_BLOCKS = 8
"""Blocks without which no interval is given."""

_NORMAL_975 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio and its uncertainty.

    Attributes:
        value: The ratio; NaN when its denominator is not positive.
        error: Standard error; NaN when unknown.
        low: Lower end of the 95 % confidence interval; NaN when unknown.
        high: Upper end.
    """

    value: float
    error: float = math.nan
    low: float = math.nan
    high: float = math.nan


class BlockRatio(Stateful):
    """Sums of two quantities over blocks of steps; up to 64 blocks.

    Example:
        >>> ratio = BlockRatio()
        >>> ratio.add_many(np.full(100, 3.0), np.full(100, 2.0))
        >>> ratio.length, ratio.complete, ratio_of_sums(ratio.sums())
        (2, 50, Estimate(value=1.5, error=0.0, low=1.5, high=1.5))
    """

    def __init__(self) -> None:
        self._sums_B2 = np.zeros((CAPACITY, 2))
        self._blocks = 0
        self._length = 1
        self._filled = 0
        self._open = np.zeros(2)

    @property
    def complete(self) -> int:
        """How many complete blocks there are now."""
        return self._blocks

    @property
    def length(self) -> int:
        """How many steps a complete block holds."""
        return self._length

    def add(self, numerator: float, denominator: float) -> bool:
        """Take one step; one that is not finite is left out.

        Returns:
            Whether this completed a block.
        """
        if not (math.isfinite(numerator) and math.isfinite(denominator)):
            return False
        self._open += numerator, denominator
        self._filled += 1
        if self._filled < self._length:
            return False
        if self._blocks == CAPACITY:
            self._sums_B2[: CAPACITY // 2] = self._sums_B2[::2] + self._sums_B2[1::2]
            self._blocks, self._length = CAPACITY // 2, 2 * self._length
            if self._length > self._filled:
                return False
        self._sums_B2[self._blocks] = self._open
        self._blocks += 1
        self._open[:] = 0
        self._filled = 0
        return True

    def add_many(self, numerators_T: Floats, denominators_T: Floats) -> None:
        """Take many steps; the same, bit for bit, as :meth:`add` for one after the other."""
        pairs_T2 = np.stack([numerators_T, denominators_T], axis=1)
        pairs_T2 = pairs_T2[np.isfinite(pairs_T2).all(axis=1)]
        while len(pairs_T2):
            room = CAPACITY - self._blocks
            if self._filled or not room or len(pairs_T2) < self._length:
                taken = max(self._length - self._filled, 1)
                taken = min(taken, len(pairs_T2))
                before = np.concatenate([self._open[None], pairs_T2[: taken - 1]])
                self._open[:] = np.add.accumulate(before)[-1]
                self._filled += taken - 1
                self.add(*pairs_T2[taken - 1].tolist())
            else:
                count = min(room, len(pairs_T2) // self._length)
                taken = count * self._length
                blocks = pairs_T2[:taken].reshape(count, self._length, 2)
                sums = np.add.accumulate(blocks, axis=1)[:, -1] + 0.0  # a sum of −0 is 0, as in add
                self._sums_B2[self._blocks : self._blocks + count] = sums
                self._blocks += count
            pairs_T2 = pairs_T2[taken:]

    def sums(self) -> Floats:
        """Return the sums of all blocks ``[B, 2]``, the unfinished one included."""
        blocks = self._sums_B2[: self._blocks]
        return np.concatenate([blocks, self._open[None]]) if self._filled else blocks.copy()

    def halves(self) -> tuple[Floats, Floats]:
        """Return the sums of the earlier and of the later complete blocks."""
        middle = self._blocks // 2
        return self._sums_B2[:middle].copy(), self._sums_B2[middle : self._blocks].copy()


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
    return Estimate(value, error, low, value + reach)


def difference(earlier: Estimate, later: Estimate) -> float:
    """Return later minus earlier in standard errors; NaN when unknown, 0 when equal.

    Example:
        >>> difference(Estimate(1.0, error=0.3), Estimate(2.0, error=0.4))
        2.0
    """
    if earlier.value == later.value:
        return 0.0
    error = math.hypot(earlier.error, later.error)
    if math.isnan(error):
        return math.nan
    step = later.value - earlier.value
    return step / error if error > 0 else math.copysign(math.inf, step)


def student_975(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t, by an expansion around the normal one.

    Abramowitz and Stegun, 26.7.5; right to 0.01 from 4 degrees of freedom on.

    Example:
        >>> round(student_975(10), 2)
        2.23
    """
    z, n = _NORMAL_975, degrees
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def _ratio(sums: Floats, *, root: bool) -> Floats:
    ratios: Floats = sums[..., 0] / sums[..., 1]
    return np.sqrt(np.maximum(ratios, 0.0)) if root else ratios

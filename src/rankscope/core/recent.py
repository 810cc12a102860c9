"""What units showed in the recent steps, and the size of what they were given in them.

Legend of shapes: T steps, the latest first, S signals, U units.
"""

import numpy as np

from rankscope.core.arrays import Floats, Floats32, Ints
from rankscope.core.bets import Rows
from rankscope.core.state import Stateful

RECENT = 64
"""Steps that are remembered of every signal."""


class RecentSteps(Stateful):
    """Deviations and sizes of the recent steps, in constant memory.

    Args:
        num_signals: S.
        num_units: U.
    """

    SETTINGS = ("_all_S",)

    def __init__(self, num_signals: int, num_units: int) -> None:
        self._all_S = np.arange(num_signals)
        self._deviations = np.full((RECENT, num_signals, num_units), np.nan, np.float32)
        self._fed_S = np.zeros(num_signals, np.int64)
        self._sizes = np.full((RECENT, num_units), np.nan, np.float32)
        self._num_sizes = 0
        self._size_of = np.full((RECENT, num_signals), -1, np.int64)  # which size a step had

    @property
    def shape(self) -> tuple[int, int]:
        """S and U."""
        _, num_signals, num_units = self._deviations.shape
        return num_signals, num_units

    def remember(self, deviations_SU: Floats, rows: Rows, sizes_U: Floats | None) -> None:
        """Take one step.

        Args:
            deviations_SU: Deviations of the signals named by ``rows``, NaN where there is none.
            rows: The signals that this step measured.
            sizes_U: Logarithm of the size of what each unit was given, NaN where it is unknown;
                None: this step's are not kept.
        """
        number = -1
        if sizes_U is not None:
            number = self._num_sizes
            self._sizes[number % RECENT] = sizes_U
            self._num_sizes += 1
        places, signals = self._fed_S[rows] % RECENT, self._all_S[rows]
        self._deviations[places, signals] = deviations_SU
        self._size_of[places, signals] = number
        self._fed_S[rows] += 1

    def deviations(self, signal: int, age: float) -> Floats32:
        """Return the deviations of the last ``age`` steps, as far as they are known, ``[T, U]``."""
        recent: Floats32 = self._deviations[self._places(signal, age), signal]
        return recent

    def sizes(self, signal: int, age: float) -> Floats:
        """Return the sizes in the steps of :meth:`deviations`, ``[T, U]``, NaN where unknown."""
        number_T = self._size_of[self._places(signal, age), signal]
        kept_T = (number_T >= 0) & (number_T >= self._num_sizes - RECENT)
        sizes_TU: Floats = self._sizes[number_T % RECENT].astype(np.float64)
        sizes_TU[~kept_T] = np.nan
        return sizes_TU

    def _places(self, signal: int, age: float) -> Ints:
        fed = int(self._fed_S[signal])
        count = int(min(max(age, 1.0), fed, RECENT))
        return (fed - 1 - np.arange(count)) % RECENT


def without_size(deviations_TU: Floats, sizes_TU: Floats, unit: int) -> list[Floats]:
    """Take away what follows from the units' sizes, going by all units but one.

    A straight line through the origin by least squares, with sizes over the step's median. The
    unit itself has no say in it, so that what is wrong with it is not taken for a rule.

    Args:
        deviations_TU: Deviations ``[T, U]``.
        sizes_TU: Logarithms of sizes ``[T, U]``.
        unit: The unit that has no say.

    Returns:
        What is left ``[T, U]`` with the line's slope, and with two standard errors less and more;
        all is left where a size is unknown, and where sizes do not differ.
    """
    relative_TU = sizes_TU - np.nanmedian(sizes_TU, axis=1, keepdims=True)
    others_TR = np.delete(relative_TU, unit, axis=1)
    followed_TR = np.delete(deviations_TU, unit, axis=1)
    known_TR = np.isfinite(others_TR) & np.isfinite(followed_TR)
    sizes, followed = others_TR[known_TR], followed_TR[known_TR]
    squares = float(sizes @ sizes)
    if squares == 0 or len(sizes) < 2:
        return [deviations_TU]
    slope = float(sizes @ followed) / squares
    rest = followed - slope * sizes
    error = float(np.sqrt(rest @ rest / (len(sizes) - 1) / squares))
    relative_TU = np.nan_to_num(relative_TU)
    slopes = (slope, slope - 2 * error, slope + 2 * error)
    return [deviations_TU - each * relative_TU for each in slopes]

"""The deviations of units in the recent steps.

Legend of shapes: T steps, the latest first, S signals, U units.
"""

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.arrays import Floats, Floats32, Ints
from rankscope.stats.bets import Rows, rank_units
from rankscope.stats.state import Stateful

RECENT = 64
"""Remembered steps of every signal."""


class RecentSteps(Stateful):
    """Deviations of the recent steps, and the numbers of these steps, in constant memory.

    The medians that they are deviations from are for words alone: no part of the state.

    Args:
        num_signals: S.
        num_units: U.
    """

    SETTINGS = ("_all_S", "_medians")

    def __init__(self, num_signals: int, num_units: int) -> None:
        self._all_S = np.arange(num_signals)
        self._deviations = np.full((RECENT, num_signals, num_units), np.nan, np.float32)
        self._medians = np.full((RECENT, num_signals), np.nan, np.float32)
        self._steps = np.zeros((RECENT, num_signals), np.int64)
        self._fed_S = np.zeros(num_signals, np.int64)

    @property
    def shape(self) -> tuple[int, int]:
        """S and U."""
        _, num_signals, num_units = self._deviations.shape
        return num_signals, num_units

    def remember(
        self, deviations_SU: Floats, rows: Rows, step: int, medians_S: Floats | None = None
    ) -> None:
        """Add a step.

        Args:
            deviations_SU: Deviations of the signals named by ``rows``, NaN where there is none.
            rows: The signals that this step measured.
            step: Its number.
            medians_S: The medians that they deviate from, for :meth:`medians`.
        """
        fed = self._fed_S[rows]
        if isinstance(rows, slice) and (fed == fed[0]).all():  # a place for all, and no copies
            place = int(fed[0]) % RECENT
            self._deviations[place, rows] = deviations_SU
            self._medians[place, rows] = np.nan if medians_S is None else medians_S
            self._steps[place, rows] = step
            fed += 1
            return
        places = fed % RECENT
        signals = self._all_S[rows]
        self._deviations[places, signals] = deviations_SU
        self._medians[places, signals] = np.nan if medians_S is None else medians_S
        self._steps[places, signals] = step
        self._fed_S[rows] += 1

    def deviations(self, signal: int, age: float) -> Floats32:
        """Return the deviations of the last ``age`` steps, as far as they are known, ``[T, U]``."""
        recent: Floats32 = self._deviations[self._places(signal, age), signal]
        return recent

    def medians(self, signal: int, age: float) -> Floats32:
        """Return the medians of the same steps, NaN for those before a restart, ``[T]``."""
        medians: Floats32 = self._medians[self._places(signal, age), signal]
        return medians

    def step_of(self, signal: int, back: int) -> int:
        """Return the number of the step that measured a signal ``back`` times before the last one.

        Beyond the remembered steps, the distance of the two oldest ones is extrapolated. The signal
        has been measured.
        """
        fed = int(self._fed_S[signal])
        oldest = min(fed, RECENT) - 1
        steps_T = self._steps[(fed - 1 - np.arange(oldest + 1)) % RECENT, signal].tolist()
        if back <= oldest:
            return int(steps_T[back])
        apart = steps_T[-2] - steps_T[-1] if oldest > 0 else 1
        return int(steps_T[-1] - (back - oldest) * apart)

    def _places(self, signal: int, age: float) -> Ints:
        fed = int(self._fed_S[signal])
        count = int(min(max(age, 1.0), fed, RECENT))
        places: Ints = (fed - 1 - np.arange(count)) % RECENT
        return places


_FEWEST_STEPS = 4


def friedman(values_TU: NDArray[np.floating], level: float) -> tuple[Floats, bool]:
    """Test whether units are alike, by their ranks within each step.

    Friedman, "The use of ranks to avoid the assumption of normality implicit in the analysis of
    variance", 1937; the chi-square quantile after Wilson and Hilferty, 1931.

    Args:
        values_TU: One value per step and unit; steps with a missing one are left out.
        level: Probability of a difference for units that are alike.

    Returns:
        How far each unit's mean rank is from the middle ``[U]``, in standard deviations of the
        mean rank of units that are alike; and whether they are alike, which is True with fewer
        than four steps, or two units.

    Example:
        >>> z_U, alike = friedman(np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]] * 10), level=0.01)
        >>> z_U.round(2).tolist(), alike
        ([-5.48, 0.0, 5.48], False)
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
    return z_U, bool(z < NormalDist().inv_cdf(1 - level))

"""The deviations of units in the recent steps.

Legend of shapes: T steps, the latest first, S signals, U units.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.arrays import Bools, Floats, Floats32, Ints
from rankscope.stats.bets import (
    RARE_FROM,
    RARE_STAKE,
    Bet,
    BetKind,
    Ranked,
    Rows,
    normal_scores,
    rank_units,
)
from rankscope.stats.state import Stateful

RECENT = 64
"""Stored steps of every signal."""


class RecentSteps(Stateful):
    """Deviations of the recent steps, and the numbers of these steps, in constant memory.

    The medians that they are deviations from are for words alone: no part of the state.
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

        ``deviations_SU``: deviations of the signals named by ``rows``, NaN where there is none.
        ``rows``: the signals that this step measured. ``medians_S``: the medians that they deviate
        from, for :meth:`medians`.
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

    def deviations(self, signal: int, age: float, last: int | None = None) -> Floats32:
        """Return the deviations of ``age`` steps, as far as they are known, ``[T, U]``.

        The latest of them is number ``last``, or the last step without it.
        """
        recent: Floats32 = self._deviations[self._places(signal, age, last), signal]
        return recent

    def medians(self, signal: int, age: float, last: int | None = None) -> Floats32:
        """Return the medians of the same steps, NaN for those before a restart, ``[T]``."""
        medians: Floats32 = self._medians[self._places(signal, age, last), signal]
        return medians

    def step_of(self, signal: int, back: int) -> int:
        """Return the number of the step that measured a signal ``back`` times before the last one.

        Beyond the stored steps, the distance of the two oldest ones is extrapolated. The signal
        has been measured.
        """
        fed = int(self._fed_S[signal])
        oldest = min(fed, RECENT) - 1
        steps_T = self._steps[(fed - 1 - np.arange(oldest + 1)) % RECENT, signal].tolist()
        if back <= oldest:
            return int(steps_T[back])
        apart = steps_T[-2] - steps_T[-1] if oldest > 0 else 1
        return int(steps_T[-1] - (back - oldest) * apart)

    def _places(self, signal: int, age: float, last: int | None = None) -> Ints:
        fed = int(self._fed_S[signal])
        places: Ints = (fed - 1 - np.arange(min(fed, RECENT))) % RECENT
        if last is not None:
            places = places[self._steps[places, signal] <= last]
        return places[: int(max(age, 1.0))]


_FEWEST_STEPS = 4


def friedman(values_TU: NDArray[np.floating], level: float) -> tuple[Floats, bool]:
    """Test whether units are alike, by their ranks within each step.

    Friedman, "The use of ranks to avoid the assumption of normality implicit in the analysis of
    variance", 1937; the chi-square quantile after Wilson and Hilferty, 1931.

    Steps with a missing value are left out. Returned are how far each unit's mean rank is from the
    middle ``[U]``, in standard deviations of the mean rank of units that are alike; and whether
    they are alike, which is True with fewer than four steps, or two units. Units that are alike
    differ with a probability of ``level``.

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


CERTAIN = float(np.log(1e8))
"""Largest log evidence that a followed unit keeps, so that it heals in bounded time."""

HEALED = 0.25
"""Certainty at and below which a followed unit counts as being like the others again."""

RARE_FADES = 0.95
"""Share of the evidence for rare errors that remains after a step without one."""

_STILL_CERTAIN = 0.9
_SEEN_QUICKLY = 0.75


@dataclass(eq=False)
class FollowedUnit(Stateful):
    """A unit that was found unlike the others: a CUSUM for each bet and signal.

    The initially strongest one is followed until it has lost nearly all its evidence; if another is
    still certain then, that one is followed. Bets on rare errors lose slowly by nature, so they are
    followed only where no other bet shows the fault as well.
    """

    log_BS: Floats
    ages_BS: Floats32
    patient_B: Bools  # which bets are on rare errors
    bet: int  # followed, of this signal
    signal: int

    @classmethod
    def of(cls, log_BS: Floats, ages_BS: Floats32, patient_B: Bools) -> "FollowedUnit":
        """Return a unit with this evidence, which began so many steps ago."""
        quick_BS = np.where(patient_B[:, None], 0, log_BS)
        seen = quick_BS.max() >= _SEEN_QUICKLY * log_BS.max()
        followed = _argmax(quick_BS if seen else log_BS)
        return cls(np.minimum(log_BS, CERTAIN), ages_BS, patient_B, *followed)

    @property
    def certainty(self) -> float:
        """Certainty that the unit is still unlike the others, 1 to 0."""
        return float(self.log_BS[self.bet, self.signal]) / CERTAIN

    def observe(self, e_BS: Floats, rows: Rows) -> None:
        """Add the e-values of a step, of the signals named by ``rows``."""
        self.ages_BS[:, rows] += 1
        self.log_BS[:, rows] = np.clip(self.log_BS[:, rows] + np.log(e_BS), 0, CERTAIN)
        if self.certainty <= HEALED:
            quick_BS = np.where(self.patient_B[:, None], 0, self.log_BS)
            if quick_BS.max() >= _STILL_CERTAIN * CERTAIN:
                self.bet, self.signal = _argmax(quick_BS)


def _argmax(values_BS: Floats) -> tuple[int, int]:
    row, column = divmod(int(values_BS.argmax()), values_BS.shape[1])
    return row, column


def compare_with_others(
    values_S: Floats, z_S: Floats32, ranked: Ranked, bets: Sequence[Bet]
) -> Floats:
    """Return the e-values of one unit among the others, for each bet and signal ``[B, S]``.

    ``z_S``: how far out they are, in robust standard deviations.
    """
    others_SU = ranked.sorted_SU
    unit_S1 = values_S[:, None]
    plain_S = _doubled(others_SU, unit_S1)
    middle_S1 = _middle_with(others_SU, unit_S1, ranked.counts_S)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        folded_S = _doubled(np.abs(others_SU - middle_S1), np.abs(unit_S1 - middle_S1))
    usable_S = np.isfinite(values_S) & (ranked.counts_S >= 2)
    counts_S = np.where(usable_S, ranked.counts_S + 1, 0)
    return _e_values(plain_S, folded_S, z_S, counts_S, bets)


def compare_among(
    unit: int, z_S: Floats32, ranked: Ranked, away: Ranked, bets: Sequence[Bet]
) -> Floats:
    """Return the same of one of the ranked units, which may be one of two.

    ``away``: the ranked distances from the median. Equal values are no evidence here: they lower
    that on the unit.
    """
    plain_S = ranked.doubled_SU[:, unit]
    counts_S = np.where((plain_S >= 0) & (ranked.counts_S >= 2), ranked.counts_S, 0)
    return _e_values(plain_S, away.doubled_SU[:, unit], z_S, counts_S, bets)


def _e_values(
    plain_S: NDArray[np.integer],
    folded_S: NDArray[np.integer],
    z_S: Floats32,
    counts_S: Ints,
    bets: Sequence[Bet],
) -> Floats:
    """Return the e-values of a unit by its doubled mid-ranks; 1 where it is compared with none."""
    e_BS = np.ones((len(bets), len(counts_S)))
    for count in set(counts_S[counts_S > 0].tolist()):
        rows = (counts_S == count).nonzero()[0]
        plain = plain_S[rows]
        folded = folded_S[rows]
        for bet, e in zip(bets, e_BS, strict=True):
            if bet.kind is BetKind.RARE:
                far = z_S[rows] > RARE_FROM
                e[rows] = np.where(far, 1 - RARE_STAKE + RARE_STAKE * count, RARE_FADES)
            else:
                e_D = _by_rank(count, bet.strength, down=bet.kind is BetKind.DOWN)
                e[rows] = e_D.take(folded if bet.kind is BetKind.SPREAD else plain)
    return e_BS


@lru_cache(maxsize=1024)
def _by_rank(count: int, strength: float, *, down: bool) -> Floats:
    """Return the e-value of each doubled mid-rank that a unit can have among ``count`` of them."""
    scores = normal_scores(count)
    mean = np.exp(strength * scores[::2]).mean()
    e_D: Floats = np.exp(strength * (-scores if down else scores)) / mean
    return e_D


def _doubled(others_SU: Floats, unit_S1: Floats) -> Ints:
    """Return twice the mid-rank from 0 that each row's unit has among the others."""
    below = others_SU < unit_S1
    equal = others_SU == unit_S1
    doubled: Ints = 2 * np.count_nonzero(below, axis=1) + np.count_nonzero(equal, axis=1)
    return doubled


def _middle_with(sorted_SU: Floats, unit_S1: Floats, counts_S: Ints) -> Floats:
    """Return the median of each row and its unit: that of n others and one more."""
    rows = np.arange(len(counts_S))
    last = sorted_SU.shape[1] - 1
    at_S = np.count_nonzero(sorted_SU < unit_S1, axis=1)
    middle_S = np.zeros(len(counts_S))
    for index_S in (counts_S // 2, (counts_S + 1) // 2):
        column_S = np.minimum(np.maximum(index_S - (index_S > at_S), 0), last)
        from_others = sorted_SU[rows, column_S]
        middle_S += np.where(index_S == at_S, unit_S1[:, 0], from_others) / 2
    return middle_S

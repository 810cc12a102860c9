"""The test of exchangeability: is one unit unlike the others, in any signal, in any way?

Units are workers, or pairs of workers. Every step gives one value per signal and unit; every bet
(:mod:`rankscope.core.bets`) turns them into e-values, and one e-detector per bet, signal and unit
collects them. Their mean with fixed weights, M, is the evidence that *some* unit is unlike the
others: in a healthy run of N steps it reaches c with a probability of at most N/c.

A unit that was found unlike the others is set apart: the others are compared without it from the
next step on (which their exchangeability allows, given the past), and the unit is compared with
them, so that one sees when it heals.

Legend of shapes: S signals, U units, B bets, A units set apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.core.apart import SetApart, compare_with_others
from rankscope.core.arrays import Floats, Floats32, Ints
from rankscope.core.bets import (
    Bet,
    Betting,
    Kind,
    Ranked,
    RobustScale,
    Rows,
    distances,
    rank_units,
)
from rankscope.core.budget import ShiryaevRoberts
from rankscope.core.recent import RECENT, RecentSteps, friedman
from rankscope.core.state import State, StateError, Stateful

MANY = 8
LEVEL_OF_MANY, LEVEL_OF_FEW = 1e-2, 1e-3
"""Levels of the test whether the others are alike. Of many, some may be left out and it is asked
again, so that chance alone hardly ever makes the others differ."""

_FEWEST_STEPS = 8
_FAR_OUT = 3.5
_NEAR_THE_STRONGEST = 0.6
_NEARLY_AS_STRONG = 0.8
_ONE_SIDED = 0.7


@dataclass(frozen=True, slots=True)
class Trace:
    """One way in which a unit is unlike the others.

    Attributes:
        signal: Index of the signal.
        kind: High, low, spread or rare.
        log_evidence: Logarithm of the evidence in this signal alone.
        age: How many steps ago it began, this one included.
        deviation: Median deviation over the recent steps since then, in units of the signal; the
            largest one for spread and rare errors.
        relative: Whether it is a part of the others' median; an absolute difference otherwise.
    """

    signal: int
    kind: Kind
    log_evidence: float
    age: float
    deviation: float
    relative: bool = True


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a test will take of the next steps.

    Attributes:
        rows: The signals that they measure.
        e_BTRU: The e-values.
        middle_TR: The medians.
        deviations_TRU: The deviations that are remembered.
        z_TRU: Distances from the median, in robust standard deviations.
        pasts_TR: What is known of scales after each step, and
        counts_TR: from how many steps.
    """

    rows: Rows
    e_BTRU: Floats32
    middle_TR: Floats
    deviations_TRU: Floats
    z_TRU: Floats
    pasts_TR: Floats
    counts_TR: Floats


class ExchangeabilityTest(Stateful):
    """Compares units in several signals, step after step, in constant memory.

    Args:
        num_units: U.
        weights_S: Share of each signal in the evidence; they sum to 1.
        relative_S: Whether deviations from the median are told in parts of it, where all values
            are positive.
        bets: What to bet on; their weights sum to 1.

    Attributes:
        z_SU: Distances from the median in the last step, in robust standard deviations; 0 for
            what that step did not measure.

    Example:
        >>> from rankscope.core.bets import worker_bets
        >>> test = ExchangeabilityTest(4, np.ones(1), np.ones(1, bool), worker_bets())
        >>> for step, values_W in enumerate(np.random.default_rng(0).normal(size=(40, 4))):
        ...     test.observe((values_W + [0, 0, 0, 4])[None], np.arange(1), step)
        >>> int(test.evidence_of_units().argmax()), test.evidence > 1e6
        (3, True)
    """

    def __init__(
        self,
        num_units: int,
        weights_S: Floats,
        relative_S: NDArray[np.bool_],
        bets: Sequence[Bet],
    ) -> None:
        shape = len(bets), len(weights_S), num_units
        self.num_units = num_units
        self._relative_S = relative_S
        self._bets = tuple(bets)
        self._betting = Betting(bets)
        self._patient_B = np.array([bet.kind is Kind.RARE for bet in bets])
        shares_B = np.array([bet.weight for bet in bets])
        self._weights_BS = (shares_B[:, None] * weights_S / max(1, num_units)).astype(np.float32)
        self._scale = RobustScale(len(weights_S))
        self._detectors = ShiryaevRoberts(*shape)
        self._e = np.ones(shape, np.float32)
        self._recent = RecentSteps(*shape[1:])
        self._all_S = np.arange(len(weights_S))
        self._apart: dict[int, SetApart] = {}
        self.z_SU = np.zeros(shape[1:], np.float32)

    @property
    def set_apart(self) -> tuple[int, ...]:
        """Units that are set apart, in the order in which that was done."""
        return tuple(self._apart)

    def observe(self, values_SU: Floats, rows: Ints, step: int = 0) -> None:
        """Take one step.

        Args:
            values_SU: Values of the signals named by ``rows``, NaN where a unit has none. Units
                that are set apart have theirs, too.
            rows: Indices of the signals that this step measures, ascending.
            step: Its number, for :meth:`onset` alone.
        """
        values = np.array(values_SU, np.float64)
        finite = np.isfinite(values)
        if np.count_nonzero(finite) < values.size:
            values[~finite] = np.nan
        together = values
        if self._apart:
            together = values.copy()
            together[:, list(self._apart)] = np.nan
        ranked = rank_units(together)
        middle_S, away, current_S = distances(ranked)
        measured = as_slice(rows)
        scales_S = self._scales(ranked, current_S, measured)
        e = self._e[:, : len(rows)]
        self._betting.write_e_values(ranked, away, scales_S, e)
        self._detectors.observe(e, (slice(None), measured))
        self._remember(values, middle_S, scales_S, measured, step)
        for unit, apart in self._apart.items():
            z_S = self.z_SU[rows, unit]
            apart.observe(compare_with_others(values[:, unit], z_S, ranked, self._bets), rows)

    def look_ahead(self, values_TRU: Floats, rows: Ints) -> "Ahead":
        """Compute what :meth:`observe` would of T steps in which nothing is set apart.

        Args:
            values_TRU: Values of the signals named by ``rows``, finite or NaN.
            rows: Indices of the signals that these steps measure, ascending.

        Returns:
            What :meth:`take` needs; nothing has changed yet.
        """
        num_steps, num_rows, width = shape = values_TRU.shape
        ranked = rank_units(values_TRU.reshape(-1, width))
        middle, away, current = distances(ranked)
        measured = as_slice(rows)
        scales = np.full((num_steps, num_rows), np.nan)
        pasts = counts = scales
        if width >= 3:
            current_TR = current.reshape(num_steps, num_rows)
            scales, pasts, counts = self._scale.look_ahead(current_TR, measured)
        e = np.ones((len(self._bets), num_steps * num_rows, width), np.float32)
        self._betting.write_e_values(ranked, away, scales.reshape(-1), e)
        middle_TR = middle.reshape(num_steps, num_rows)
        away_TRU = values_TRU - middle_TR[:, :, None]
        unit_TR = np.where(self._relative_S[measured] & (middle_TR > 0), middle_TR, 1.0)
        scale_TR = np.where(scales > 0, scales, np.nan)
        with np.errstate(invalid="ignore", over="ignore"):
            deviations = away_TRU / unit_TR[:, :, None]
            z_TRU = np.fmax(np.abs(away_TRU) / scale_TR[:, :, None], 0.0)
        return Ahead(measured, e.reshape(-1, *shape), middle_TR, deviations, z_TRU, pasts, counts)

    def take(self, ahead: "Ahead", at: int, step: int) -> None:
        """Take one of the steps of which was looked ahead, in their order.

        Args:
            ahead: What :meth:`look_ahead` returned.
            at: Which one.
            step: Its number.
        """
        rows = ahead.rows
        if self.num_units >= 3:
            self._scale.know(ahead.pasts_TR[at], ahead.counts_TR[at], rows)
        self._detectors.observe(ahead.e_BTRU[:, at], (slice(None), rows))
        self._recent.remember(ahead.deviations_TRU[at], rows, step, ahead.middle_TR[at])
        if ahead.z_TRU.shape[1] < len(self.z_SU):
            self.z_SU[:] = 0
        self.z_SU[rows] = ahead.z_TRU[at]

    @property
    def most_evidence(self) -> float:
        """What M is not above."""
        return float(self._detectors.evidence.max(initial=0.0))

    @property
    def evidence(self) -> float:
        """M: evidence that some unit is unlike the others, 0 at first."""
        return float(self.evidence_of_units().sum())

    def evidence_of_units(self) -> Floats:
        """Return the share of each unit in M ``[U]``; 0 for units that are set apart."""
        weighted = self._weights_BS[:, :, None] * self._detectors.evidence
        evidence: Floats = weighted.reshape(-1, self.num_units).sum(axis=0).astype(np.float64)
        if self._apart:
            evidence[list(self._apart)] = 0
        return evidence

    def traces(self, unit: int, least: float = 0.0, since: float = RECENT) -> list[Trace]:
        """Return in which signals and how a unit is unlike the others, the strongest first.

        Args:
            unit: The unit.
            since: How many steps the deviations are taken from at most.
            least: Signals with less logarithmic evidence are left out, and those with less than
                0.6 of the strongest one's: what chance gives to some of many signals.
        """
        log_BS, ages_BS = self._log_evidence(unit)
        best_S, log_S = log_BS.argmax(axis=0).tolist(), log_BS.max(axis=0)
        least = max(least, _NEAR_THE_STRONGEST * float(log_S.max()))
        traces = []
        for signal in np.argsort(-log_S, kind="stable").tolist():
            if log_S[signal] >= least > 0:
                age = float(ages_BS[best_S[signal], signal])
                kind = self._kind(signal, unit, min(age, since), log_BS[:, signal])
                size = self._size(signal, unit, min(age, since), kind)
                traces.append(Trace(signal, kind, float(log_S[signal]), age, *size))
        return traces

    def _log_evidence(self, unit: int) -> tuple[Floats, Floats32]:
        """Return the logarithm of each bet's evidence, and its age, ``[B, S]`` each."""
        apart = self._apart.get(unit)
        if apart is not None:
            return apart.log_BS, apart.ages_BS
        evidence_BS = self._detectors.evidence[:, :, unit].astype(np.float64)
        return np.log(np.maximum(evidence_BS, 1.0)), self._detectors.age[:, :, unit]

    def steps_since(self, unit: int, signal: int, kind: Kind) -> float:
        """Return how many steps ago a unit came to differ in a signal, this step included.

        Where the mean over all beginnings lies within the steps that are remembered, the beginning
        with the most evidence is taken (that of a CUSUM): it depends less on luck before. For rare
        errors always, since all beginnings between two of them are as good.

        Args:
            unit: The unit.
            signal: Index of the signal.
            kind: How it differs, as its trace says.
        """
        log_BS, ages_BS = self._log_evidence(unit)
        of_kind = np.array([bet.kind is kind for bet in self._bets])
        best = int(np.where(of_kind, log_BS[:, signal], -1).argmax())
        bet, age = self._bets[best], float(ages_BS[best, signal])
        if age > RECENT and kind is not Kind.RARE:
            return age
        since_BT = _evidence_since(self._compared(unit, signal, RECENT), unit, (bet,))
        return float(since_BT[0].argmax() + 1)

    def onset(self, unit: int, signal: int, kind: Kind) -> int:
        """Return the number of the step in which a unit came to differ, as :meth:`steps_since`."""
        back = round(self.steps_since(unit, signal, kind) - 1)
        return max(0, self._recent.step_of(signal, back))

    def odd_ones_out(self, units: Sequence[int], signal: int, age: float) -> list[int] | None:
        """Return who must be left out for the other units to be alike in a signal.

        Friedman's test on the ranks of the recent steps; while it sees a difference, those whose
        mean rank is farthest out are left out, too.

        Args:
            units: Who is left out to begin with, beside those who are set apart.
            signal: Index of the signal.
            age: Over how many recent steps, as far as they are remembered.

        Returns:
            Units, ascending; None when those who are alike are no majority.
        """
        recent_TU = self._recent.deviations(signal, max(age, _FEWEST_STEPS))
        out = {*units, *self._apart}
        level = LEVEL_OF_MANY if self.num_units >= MANY else LEVEL_OF_FEW
        while 2 * len(out) < self.num_units:
            rest = [unit for unit in range(self.num_units) if unit not in out]
            z_R, alike = friedman(recent_TU[:, rest], level)
            if alike:
                return sorted(out)
            limit = min(float(np.abs(z_R).max()), _FAR_OUT)
            out.update(rest[index] for index in np.flatnonzero(np.abs(z_R) >= limit))
        return None

    def set_unit_apart(self, unit: int) -> None:
        """Compare the others without this unit from the next step on."""
        log_BS, ages_BS = self._log_evidence(unit)
        self._apart[unit] = SetApart(log_BS, ages_BS.copy(), self._patient_B)

    def certainty(self, unit: int) -> float:
        """Return how sure it still is that a unit set apart is unlike the others, 1 to 0.

        Raises:
            KeyError: The unit is not set apart.
        """
        return self._apart[unit].certainty

    def start_anew(self) -> None:
        """Forget the evidence on all units. What it has spent of the budget stays spent."""
        self._detectors.restart(...)

    def take_back(self, unit: int) -> None:
        """Let a unit count among the others again; its detectors start anew.

        Raises:
            KeyError: The unit is not set apart.
        """
        del self._apart[unit]
        self._detectors.restart((slice(None), slice(None), unit))

    def state(self) -> State:
        """Return a copy of all that it remembers of the steps so far."""
        return {
            "scale": self._scale.state(),
            "detectors": self._detectors.state(),
            "recent": self._recent.state(),
            "apart": [[unit, apart.state()] for unit, apart in self._apart.items()],
        }

    def restore(self, state: State) -> None:
        """Remember what a test of the same units, signals and bets remembered.

        Raises:
            StateError: The state is that of another test.
        """
        try:
            shape = self._recent.shape
            self._recent.restore(state["recent"])
            if self._recent.shape != shape:
                raise StateError("these are the states of other units or signals")
            self._scale.restore(state["scale"])
            self._detectors.restore(state["detectors"])
            self._apart = {}
            for unit, apart in state["apart"]:
                self._apart[int(unit)] = SetApart(*self._log_evidence(int(unit)), self._patient_B)
                self._apart[int(unit)].restore(apart)
        except (KeyError, TypeError, AttributeError) as error:
            raise StateError(f"this is not the state of a test: {error!r}") from error

    def _scales(self, ranked: Ranked, current_S: Floats, rows: Rows) -> Floats:
        """Return the robust scale of each signal; NaN where fewer than three units are present."""
        if ranked.count is not None and ranked.count >= 3:
            return self._scale.observe(current_S, rows)
        usable = ranked.counts_S >= 3
        scales_S = np.full(len(usable), np.nan)
        scales_S[usable] = self._scale.observe(current_S[usable], self._all_S[rows][usable])
        return scales_S

    def _remember(
        self, values: Floats, middle_S: Floats, scales_S: Floats, rows: Rows, step: int
    ) -> None:
        away = values - middle_S[:, None]
        unit_S = np.where(self._relative_S[rows] & (middle_S > 0), middle_S, 1.0)
        scale_S = np.where(scales_S > 0, scales_S, np.nan)
        if len(away) < len(self.z_SU):
            self.z_SU[:] = 0
        with np.errstate(invalid="ignore", over="ignore"):
            self._recent.remember(away / unit_S[:, None], rows, step, middle_S)
            np.abs(away, out=away)
            away /= scale_S[:, None]
            self.z_SU[rows] = np.fmax(away, 0.0)  # 0 where it is not known

    def _kind(self, signal: int, unit: int, age: float, log_B: Floats) -> Kind:
        """Return how a unit differs, by its recent deviations."""
        recent = self._recent_deviations(signal, unit, age)
        best = self._bets[int(log_B.argmax())].kind
        if not len(recent):
            return best
        middle = float(np.median(recent))
        if np.mean(np.sign(recent) == np.sign(middle)) >= _ONE_SIDED:
            return Kind.UP if middle > 0 else Kind.DOWN
        two_sided = [
            (log, bet.kind)
            for log, bet in zip(log_B.tolist(), self._bets, strict=True)
            if bet.kind in (Kind.SPREAD, Kind.RARE)
        ]
        log, kind = max(two_sided, key=lambda pair: pair[0], default=(0.0, best))
        return best if log < _NEARLY_AS_STRONG * log_B.max() else kind

    def _size(self, signal: int, unit: int, age: float, kind: Kind) -> tuple[float, bool]:
        """Return the typical or largest recent deviation, and whether it is a part of the median.

        It is an absolute difference where a value of another unit was negative, or a median was
        not positive: parts of such medians say nothing. Medians from before a restart are unknown.
        """
        recent_TU = self._recent.deviations(signal, age)
        recent_T, medians_T = recent_TU[:, unit], self._recent.medians(signal, age)
        relative = bool(self._relative_S[signal])
        others_TV = np.delete(recent_TU, unit, axis=1)
        if relative and ((others_TV < -1).any() or (medians_T <= 0).any()):
            relative = False
            with np.errstate(over="ignore"):
                recent_T = recent_T * np.where(medians_T <= 0, np.float32(1), medians_T)
        recent_T = recent_T[np.isfinite(recent_T)]
        if not len(recent_T):
            return float("nan"), relative
        if kind in (Kind.SPREAD, Kind.RARE):
            return float(recent_T[np.abs(recent_T).argmax()]), relative
        typical = float(np.median(recent_T))
        if not typical and recent_T.any():  # amounts near the median count as equal to it
            typical = float(np.median(recent_T[recent_T != 0]))
        return typical, relative

    def _recent_deviations(self, signal: int, unit: int, age: float) -> Floats32:
        recent = self._recent.deviations(signal, age)[:, unit]
        return recent[np.isfinite(recent)]

    def _compared(self, unit: int, signal: int, age: float) -> Floats:
        """Return the recent deviations, without the other units that are set apart, ``[T, U]``."""
        recent_TU = self._recent.deviations(signal, age).astype(np.float64)
        recent_TU[:, [other for other in self._apart if other != unit]] = np.nan
        return recent_TU


def _evidence_since(recent_TU: Floats, unit: int, bets: Sequence[Bet]) -> Floats:
    """Return the logarithm of each bet's evidence on a unit since each step ``[B, T]``."""
    ranked = rank_units(recent_TU)
    _, away, scales_T = distances(ranked)
    scales_T = np.maximum(scales_T, np.nanmedian(scales_T))  # steadier, as in observe
    e_BTU = np.ones((len(bets), *recent_TU.shape), np.float32)
    Betting(bets).write_e_values(ranked, away, scales_T, e_BTU)
    since_BT: Floats = np.log(e_BTU[:, :, unit].astype(np.float64)).cumsum(axis=1)
    return since_BT


def as_slice(rows: Ints) -> Rows:
    """Return ascending indices as a slice where they are neighbours: it selects without a copy.

    Example:
        >>> as_slice(np.array([3, 4, 5])), as_slice(np.array([3, 5]))
        (slice(3, 6, None), array([3, 5]))
    """
    neighbours = len(rows) > 0 and rows[-1] - rows[0] == len(rows) - 1
    return slice(int(rows[0]), int(rows[-1]) + 1) if neighbours else rows

"""The test of exchangeability: is one unit unlike the others, in any signal, in any way?

Units are workers, or pairs of workers. Every step gives one value per signal and unit; every bet
(:mod:`rankscope.stats.bets`) turns them into e-values, and one e-detector per bet, signal and unit
collects them. Their mean with fixed weights, M, is the evidence that *some* unit is unlike the
others: in a healthy run of N steps it reaches c with a probability of at most N/c.

A unit that was found unlike the others is flagged: the others are compared without it from the next
step on (which their exchangeability allows, given the past), and the unit is compared with them,
which shows when it heals. Where it is unknown which units to leave out, some are followed among the
others instead.

Legend of shapes: T steps, S signals, R signals that a step measures, U units, B bets.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rankscope.stats.arrays import Bools, Floats, Floats32, Ints
from rankscope.stats.bets import (
    Bet,
    BetKind,
    Betting,
    Ranked,
    Rows,
    Scales,
    ShiryaevRoberts,
    distances,
    rank_units,
    steady_scales,
)
from rankscope.stats.state import State, StateError, Stateful
from rankscope.stats.units import (
    RECENT,
    FollowedUnit,
    RecentSteps,
    compare_among,
    compare_with_others,
    friedman,
)

MANY = 8
LEVEL_OF_MANY = 1e-2
LEVEL_OF_FEW = 1e-3
"""Levels of the test whether the others are alike. With many units, some may be left out and the
test repeated, so that chance alone hardly ever makes the others differ."""

_FEWEST_STEPS = 8
_FAR_OUT = 3.5
_NEAR_THE_STRONGEST = 0.6
_NEARLY_AS_STRONG = 0.8
_ONE_SIDED = 0.7


@dataclass(frozen=True, slots=True)
class SignalTrace(Stateful):
    """One way in which a unit is unlike the others."""

    signal: int
    log_evidence: float  # logarithm of the evidence in this signal alone
    age: float  # how many steps ago it began, this one included
    # median deviation over the recent steps since then, in units of the signal; the largest one for
    # spread and rare errors
    deviation: float
    # whether it is a part of the others' median; an absolute difference otherwise
    relative: bool
    kind: BetKind = BetKind.UP  # high, low, spread or rare


@dataclass(frozen=True, slots=True)
class _Compared:
    """Consecutive steps, compared as if no unit were flagged or unflagged between them."""

    rows: Rows
    e_BTRU: Floats32  # the e-values of units among each other
    middle_TR: Floats
    deviations_TRU: Floats
    z_TRU: Floats32  # distances from them, in robust standard deviations
    scales: Scales  # the scales of these distances after each step
    e_of_followed_BTR: Mapping[int, Floats]  # those of each flagged or followed unit


class ExchangeabilityTest(Stateful):
    """Compares units in several signals, step after step, in constant memory.

    ``weights_S`` are the signals' shares in the evidence; they sum to 1, as the bets' weights do.
    ``relative_S``: whether deviations from the median are given in parts of it, where all values
    are positive. ``z_SU`` are distances from the median in the last step, in robust standard
    deviations; 0 for signals that it did not measure.

    Example:
        >>> from rankscope.stats.bets import worker_bets
        >>> test = ExchangeabilityTest(4, np.ones(1), np.ones(1, bool), worker_bets())
        >>> values_TSW = np.random.default_rng(0).normal(size=(40, 1, 4)) + [0, 0, 0, 4]
        >>> for step in test.observe(values_TSW, range(40)):
        ...     evidence_W = test.evidence_of_units()  # after each of them
        >>> int(evidence_W.argmax()), test.evidence > 1e6
        (3, True)
    """

    SETTINGS = (
        *("num_units", "_relative_S", "_bets", "_betting", "_patient_B", "_weights_BS", "z_SU"),
    )

    def __init__(
        self,
        num_units: int,
        weights_S: Floats,
        relative_S: Bools,
        bets: Sequence[Bet],
    ) -> None:
        shape = len(bets), len(weights_S), num_units
        self.num_units = num_units
        self._relative_S = relative_S
        self._bets = tuple(bets)
        self._betting = Betting(bets)
        self._patient_B = np.array([bet.kind is BetKind.RARE for bet in bets])
        shares_B = np.array([bet.weight for bet in bets])
        self._weights_BS = (shares_B[:, None] * weights_S / max(1, num_units)).astype(np.float32)
        self._scale_S = np.full(len(weights_S), np.nan)
        self._scale_steps_S = np.zeros(len(weights_S))
        self._detectors = ShiryaevRoberts(*shape)
        self._recent = RecentSteps(*shape[1:])
        self._flagged: dict[int, FollowedUnit] = {}
        self._followed: dict[int, FollowedUnit] = {}  # not flagged
        self.z_SU = np.zeros(shape[1:], np.float32)

    @property
    def flagged(self) -> tuple[int, ...]:
        """Flagged units, in the order of their flags."""
        return tuple(self._flagged)

    @property
    def unlike(self) -> tuple[int, ...]:
        """Flagged and followed units."""
        return *self._flagged, *self._followed

    def observe(self, values_TSU: Floats, steps: Sequence[int]) -> Iterator[int]:
        """Process consecutive steps, one with each iteration; yield each step's number.

        A unit may be flagged, followed or released after any of them; those that follow are
        compared accordingly.

        ``values_TSU``: values of all signals, NaN where a unit has none; flagged units have theirs,
        too. A signal without any is not measured in that step.
        """
        finite_TSU = np.isfinite(values_TSU)
        if np.count_nonzero(finite_TSU) < values_TSU.size:
            values_TSU = np.where(finite_TSU, values_TSU, np.nan)
        measured_TS: Bools = np.logical_or.reduce(finite_TSU, axis=2)
        at = 0
        while at < len(steps):
            other_T = (measured_TS[at:] != measured_TS[at]).any(axis=1)
            end = at + (int(other_T.argmax()) if other_T.any() else len(other_T))
            rows = measured_TS[at].nonzero()[0]
            compared = self._compare(values_TSU[at:end], rows) if len(rows) else None
            unlike = self.unlike
            for index in range(end - at):
                self._learn(compared, index, steps[at])
                yield steps[at]
                at += 1
                if self.unlike != unlike:
                    break

    def _compare(self, values_TSU: Floats, rows: Ints) -> _Compared:
        """Compare the units in steps that measure the same signals, without learning from them."""
        measured = as_slice(rows)
        values = values_TSU[:, measured]
        num_steps, num_rows, width = values.shape
        together = values
        if self._flagged:
            together = values.copy()
            together[:, :, list(self._flagged)] = np.nan
        ranked = rank_units(together.reshape(-1, width))
        middle, away, current = distances(ranked)
        middle_TR = middle.reshape(num_steps, num_rows)
        if ranked.count is None or ranked.count < 3:
            current = np.where(ranked.counts_S >= 3, current, np.nan)
        current_TR = current.reshape(num_steps, num_rows)
        scales = steady_scales(self._scale_S[measured], self._scale_steps_S[measured], current_TR)
        used_TR = scales.used_TR
        e = np.empty((len(self._bets), num_steps * num_rows, width), np.float32)
        self._betting.write_e_values(ranked, away, used_TR.reshape(-1), e)
        away_TRU = values - middle_TR[:, :, None]
        unit_TR = np.where(self._relative_S[measured] & (middle_TR > 0), middle_TR, 1.0)
        scale_TR = np.where(used_TR > 0, used_TR, np.nan)
        with np.errstate(invalid="ignore", over="ignore"):
            deviations_TRU = away_TRU / unit_TR[:, :, None]
            np.abs(away_TRU, out=away_TRU)
            away_TRU /= scale_TR[:, :, None]
            z_TRU = np.fmax(away_TRU, 0.0).astype(np.float32)  # 0 where it is not known
        return _Compared(
            measured,
            e.reshape(-1, num_steps, num_rows, width),
            middle_TR,
            deviations_TRU,
            z_TRU,
            scales,
            self._compare_unlike(values, z_TRU, ranked, away),
        )

    def _compare_unlike(
        self, values_TRU: Floats, z_TRU: Floats32, ranked: Ranked, away: Ranked
    ) -> Mapping[int, Floats]:
        """Return the e-values of each flagged or followed unit among the others ``[B, T, R]``."""
        shape = len(self._bets), *values_TRU.shape[:2]
        e_of = {
            unit: compare_with_others(
                values_TRU[:, :, unit].reshape(-1),
                z_TRU[:, :, unit].reshape(-1),
                ranked,
                self._bets,
            )
            for unit in self._flagged
        }
        for unit in self._followed:
            z_S = z_TRU[:, :, unit].reshape(-1)
            e_of[unit] = compare_among(unit, z_S, ranked, away, self._bets)
        return {unit: e_BS.reshape(shape) for unit, e_BS in e_of.items()}

    def _learn(self, compared: _Compared | None, at: int, step: int) -> None:
        """Learn from one of the compared steps; None if it measures nothing."""
        if compared is None:
            self.z_SU[:] = 0
            return
        rows = compared.rows
        self._scale_S[rows] = compared.scales.past_TR[at]
        self._scale_steps_S[rows] = compared.scales.count_TR[at]
        self._detectors.observe(compared.e_BTRU[:, at], (slice(None), rows))
        self._recent.remember(compared.deviations_TRU[at], rows, step, compared.middle_TR[at])
        if compared.z_TRU.shape[1] < len(self.z_SU):
            self.z_SU[:] = 0
        self.z_SU[rows] = compared.z_TRU[at]
        for unit, followed in {**self._flagged, **self._followed}.items():
            followed.observe(compared.e_of_followed_BTR[unit][:, at], rows)

    @property
    def most_evidence(self) -> float:
        """An upper bound of M."""
        return float(self._detectors.evidence.max(initial=0.0))

    @property
    def evidence(self) -> float:
        """M: evidence that some unit is unlike the others, 0 at first."""
        return float(self.evidence_of_units().sum())

    def evidence_of_units(self) -> Floats:
        """Return the share of each unit in M ``[U]``; 0 for flagged units."""
        weighted = self._weights_BS[:, :, None] * self._detectors.evidence
        evidence: Floats = weighted.reshape(-1, self.num_units).sum(axis=0).astype(np.float64)
        if self._flagged:
            evidence[list(self._flagged)] = 0
        return evidence

    def traces(
        self, unit: int, least: float = 0.0, since: float = RECENT, last: int | None = None
    ) -> list[SignalTrace]:
        """Return in which signals and how a unit is unlike the others, the strongest first.

        ``since``: number of steps up to number ``last`` whose deviations count. ``least``: signals
        with less logarithmic evidence are left out, and those with less than 0.6 of the strongest
        one's, which some of many signals have by chance.
        """
        log_BS, ages_BS = self._log_evidence(unit)
        best_S = log_BS.argmax(axis=0).tolist()
        log_S = log_BS.max(axis=0)
        least = max(least, _NEAR_THE_STRONGEST * float(log_S.max()))
        traces = []
        for signal in np.argsort(-log_S, kind="stable").tolist():
            if log_S[signal] >= least > 0:
                age = float(ages_BS[best_S[signal], signal])
                kind = self._kind(signal, unit, min(age, since), log_BS[:, signal], last)
                size = self._size(signal, unit, min(age, since), kind, last)
                traces.append(SignalTrace(signal, float(log_S[signal]), age, *size, kind))
        return traces

    def measured_anew(self, unit: int, trace: SignalTrace, since: float, last: int) -> SignalTrace:
        """Return a trace with its deviation in ``since`` steps up to number ``last``.

        It stays as it is where most of these steps are forgotten.
        """
        known = len(self._recent.medians(trace.signal, since, last))
        if 2 * known < min(since, RECENT):
            return trace
        size = self._size(trace.signal, unit, since, trace.kind, last)
        return replace(trace, deviation=size[0], relative=size[1])

    def _log_evidence(self, unit: int) -> tuple[Floats, Floats32]:
        """Return the logarithm of each bet's evidence, and its age, ``[B, S]`` each."""
        unlike = self._flagged.get(unit) or self._followed.get(unit)
        if unlike is not None:
            return unlike.log_BS, unlike.ages_BS
        evidence_BS = self._detectors.evidence[:, :, unit].astype(np.float64)
        return np.log(np.maximum(evidence_BS, 1.0)), self._detectors.age[:, :, unit]

    def steps_since(self, unit: int, signal: int, kind: BetKind) -> float:
        """Return how many steps ago a unit came to differ in a signal, this step included.

        Where the mean over all beginnings lies within the remembered steps, the result is the
        beginning with the most evidence (that of a CUSUM): it depends less on luck before. For rare
        errors always, since all beginnings between two of them are as good. ``kind`` is that of the
        unit's trace.
        """
        log_BS, ages_BS = self._log_evidence(unit)
        of_kind = np.array([bet.kind is kind for bet in self._bets])
        best = int(np.where(of_kind, log_BS[:, signal], -1).argmax())
        bet = self._bets[best]
        age = float(ages_BS[best, signal])
        if age > RECENT and kind is not BetKind.RARE:
            return age
        recent_TU = self._recent.deviations(signal, RECENT).astype(np.float64)
        recent_TU[:, [other for other in self._flagged if other != unit]] = np.nan
        ranked = rank_units(recent_TU)
        _, away, scales_T = distances(ranked)
        scales_T = np.maximum(scales_T, np.nanmedian(scales_T))  # steadier, as in observe
        e_1TU = np.ones((1, *recent_TU.shape), np.float32)
        Betting([bet]).write_e_values(ranked, away, scales_T, e_1TU)
        since_T = np.log(e_1TU[0, :, unit].astype(np.float64)).cumsum()
        return float(since_T.argmax() + 1)

    def onset(self, unit: int, signal: int, kind: BetKind) -> int:
        """Return the number of the step in which a unit came to differ, as :meth:`steps_since`."""
        back = round(self.steps_since(unit, signal, kind) - 1)
        return max(0, self._recent.step_of(signal, back))

    def minority(self, units: Sequence[int], signal: int, age: float) -> list[int] | None:
        """Return the units to leave out for the others to be alike in a signal.

        Friedman's test on the ranks of the recent steps; while it finds a difference, the units
        whose mean rank is farthest out are left out, too.

        ``units``: units left out to begin with, beside the flagged ones. ``age``: over how many
        recent steps, as far as they are remembered.

        Returns units, ascending; None when the units that are alike are no majority.
        """
        recent_TU = self._recent.deviations(signal, max(age, _FEWEST_STEPS))
        out = {*units, *self._flagged}
        level = LEVEL_OF_MANY if self.num_units >= MANY else LEVEL_OF_FEW
        while 2 * len(out) < self.num_units:
            rest = [unit for unit in range(self.num_units) if unit not in out]
            z_R, alike = friedman(recent_TU[:, rest], level)
            if alike:
                return sorted(out)
            limit = min(float(np.abs(z_R).max()), _FAR_OUT)
            out.update(rest[index] for index in np.flatnonzero(np.abs(z_R) >= limit))
        return None

    def flag(self, unit: int) -> None:
        """Compare the others without this unit from the next step on."""
        self._flagged[unit] = self._from_now_on(unit)
        self._followed.pop(unit, None)

    def follow(self, unit: int) -> None:
        """Follow a unit that stays among the others from the next step on."""
        self._followed[unit] = self._from_now_on(unit)

    def _from_now_on(self, unit: int) -> FollowedUnit:
        log_BS, ages_BS = self._log_evidence(unit)
        return FollowedUnit.of(log_BS, ages_BS.copy(), self._patient_B)

    def certainty(self, unit: int) -> float:
        """Return the certainty that a unit is still unlike the others, 1 to 0; 0 if not known."""
        unlike = self._flagged.get(unit) or self._followed.get(unit)
        return 0.0 if unlike is None else unlike.certainty

    def start_anew(self) -> None:
        """Forget the evidence on all units; its part of the budget stays spent."""
        self._detectors.restart(...)

    def release(self, unit: int) -> None:
        """Let a unit count among the others like any of them; its detectors start anew."""
        self._flagged.pop(unit, None)
        self._followed.pop(unit, None)
        self._detectors.restart((slice(None), slice(None), unit))

    def restore(self, state: State) -> None:
        """Continue from the state of another test; StateError if it does not fit."""
        shape = self._recent.shape
        super().restore(state)
        if self._recent.shape != shape:
            raise StateError("these are the states of other units or signals")

    def _kind(self, signal: int, unit: int, age: float, log_B: Floats, last: int | None) -> BetKind:
        """Return how a unit differs, by its deviations up to a step."""
        recent = self._recent.deviations(signal, age, last)[:, unit]
        recent = recent[np.isfinite(recent)]
        best = self._bets[int(log_B.argmax())].kind
        if not len(recent):
            return best
        middle = float(np.median(recent))
        if np.mean(np.sign(recent) == np.sign(middle)) >= _ONE_SIDED:
            return BetKind.UP if middle > 0 else BetKind.DOWN
        two_sided = [
            (log, bet.kind)
            for log, bet in zip(log_B.tolist(), self._bets, strict=True)
            if bet.kind in (BetKind.SPREAD, BetKind.RARE)
        ]
        log, kind = max(two_sided, key=lambda pair: pair[0], default=(0.0, best))
        return best if log < _NEARLY_AS_STRONG * log_B.max() else kind

    def _size(
        self, signal: int, unit: int, age: float, kind: BetKind, last: int | None
    ) -> tuple[float, bool]:
        """Return the typical or largest deviation, and whether it is a part of the median.

        It is an absolute difference where a value of another unit was negative, or a median was
        not positive: parts of such medians mean nothing. Medians from before a restart are unknown.
        """
        recent_TU = self._recent.deviations(signal, age, last)
        recent_T = recent_TU[:, unit]
        medians_T = self._recent.medians(signal, age, last)
        relative = bool(self._relative_S[signal])
        others_TV = np.delete(recent_TU, unit, axis=1)
        if relative and ((others_TV < -1).any() or (medians_T <= 0).any()):
            relative = False
            with np.errstate(over="ignore"):
                recent_T = recent_T * np.where(medians_T <= 0, np.float32(1), medians_T)
        recent_T = recent_T[np.isfinite(recent_T)]
        if not len(recent_T):
            return float("nan"), relative
        if kind in (BetKind.SPREAD, BetKind.RARE):
            return float(recent_T[np.abs(recent_T).argmax()]), relative
        typical = float(np.median(recent_T))
        if not typical and recent_T.any():  # amounts near the median count as equal to it
            typical = float(np.median(recent_T[recent_T != 0]))
        return typical, relative


def as_slice(rows: Ints) -> Rows:
    """Return ascending indices as a slice where they are neighbours: it selects without a copy.

    Example:
        >>> as_slice(np.array([3, 4, 5])), as_slice(np.array([3, 5]))
        (slice(3, 6, None), array([3, 5]))
    """
    neighbours = len(rows) > 0 and rows[-1] - rows[0] == len(rows) - 1
    return slice(int(rows[0]), int(rows[-1]) + 1) if neighbours else rows

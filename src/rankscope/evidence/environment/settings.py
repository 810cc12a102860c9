"""The detectors of settings that differ between workers, or from the plan."""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.detector import Detector, FaultEvidence, PersistentFault, evidence_at
from rankscope.bus.finding import Severity
from rankscope.bus.plan import Plan
from rankscope.bus.replicas import StateKind, known_values, minority_ranks, name_values
from rankscope.bus.step import GatheredStep
from rankscope.bus.steps import Step
from rankscope.bus.words import count, name_ranks
from rankscope.stats.arrays import MISSING_INT, Bools, Floats, Ints
from rankscope.stats.state import State

STEPS_NEEDED = 3
"""Optimizer steps in which the learning rate departs from the plan before it is reported."""

CALLS = "optimizer-steps-differ"

_NOBODY = np.empty(0, bool)
_MOST_NAMED = 6
_RELATIVE = 1e-6
_OF_PEAK = 1e-9
_NAMES = {"lr": "the learning rate", "weight_decay": "the weight decay"}
_DIGESTS = {
    "rates_digest": "the learning rates of other parameter groups",
    "settings_digest": "other settings (such as momentum, betas or eps, or the weight decay of "
    "other parameter groups)",
}


class DifferentSettings(Detector):
    """Settings and calls of the optimizer that differ between workers, or from the plan.

    - Learning rate, weight decay or any other setting differs between workers in a step.
    - Some workers call ``optimizer.step`` more often than others in a step. The last step of a run
      is not judged: it may end anywhere.
    - All workers' learning rate departs from the plan.

    A worker that does not call the optimizer in a step, or takes no part in it, is not compared.
    Settings are compared among the workers whose optimizers hold the same parameters, the most:
    where each updates parameters of its own, they have settings of their own.
    """

    SETTINGS = ("_num_workers", "_planned_N", "_peak", "_anchored")

    def __init__(self, num_workers: int, plan: Plan | None = None) -> None:
        self._num_workers = num_workers
        planned = (plan or Plan()).learning_rate
        self._planned_N = np.atleast_1d(np.array(() if planned is None else planned, np.float64))
        self._peak = float(self._planned_N.max(initial=0))
        self._anchored = True
        self._settings = PersistentFault()
        self._what = ""
        self._options: list[str] = []  # settings that differ, in words, from when they began to
        self._calls = PersistentFault()
        self._waiting = -1
        self._waiting_calls = np.empty(0, np.int64)
        self._called = ""
        self._schedule = PersistentFault(STEPS_NEEDED)
        self._num_calls = 0
        self._departure: tuple[int, float, float] = (-1, 0.0, 0.0)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report differences in it and in the step before, and their end."""
        gathered = step.gathered
        calls_W = _calls(step)
        if self._num_workers > 1:
            yield from self._compare_calls(gathered.step, calls_W)
            yield from self._compare_settings(step)
        yield from self._follow_plan(gathered, calls_W)

    def close(self) -> Iterable[FaultEvidence]:
        """End the run; its last step is not judged."""
        self._waiting = -1
        return ()

    def restore(self, state: State) -> None:
        """Continue from the state of another detector; StateError if it does not fit."""
        super().restore(state)
        self._anchored = False

    # Between workers -----------------------------------------------------------------------

    def _compare_settings(self, step: Step) -> Iterable[FaultEvidence]:
        gathered = step.gathered
        active_W = gathered.workers["optimizer_steps"] != 0
        if not step.alike("held_digest"):
            active_W &= _most_frequent(gathered.workers["held_digest"], active_W)
        several = int(np.count_nonzero(active_W)) > 1
        ranks: set[int] = set()
        known = False
        parts = []
        for name, words in _NAMES.items():
            if step.alike(name):  # so none is NaN
                known |= several
                continue
            values_W = gathered.workers[name]
            known_W = active_W & ~np.isnan(values_W)
            known |= int(np.count_nonzero(known_W)) > 1
            if _alike(values_W, known_W):
                continue
            values = known_values(values_W, known_W)
            ranks.update(self._minority(values))
            parts.append(f"{words} is {name_values(values, _speller(values))}")
        options = [d.name for d in gathered.differences if d.kind is StateKind.OPTION]
        self._options = options or self._options
        for name, words in _DIGESTS.items():
            if step.alike(name):
                known |= several and step.some_known(name)
                continue
            digests_W = gathered.workers[name]
            known_W = active_W & (digests_W != MISSING_INT)
            known |= int(np.count_nonzero(known_W)) > 1
            if not _alike(digests_W, known_W):
                odd = self._minority(known_values(digests_W, known_W))
                ranks.update(odd)
                if name == "settings_digest" and self._options:
                    more = len(self._options) - _MOST_NAMED
                    parts += self._options[:_MOST_NAMED]
                    parts += [f"{count(more, 'other setting')} differ too"] if more > 0 else []
                else:
                    parts.append(f"{words} differ on {name_ranks(odd)}")
        self._what = "; ".join(parts) or self._what
        seen = self._settings
        if known and seen.observe(gathered.step, ranks):
            what = {"what": self._what}
            numbers = {"steps": seen.count, **what}
            cause = "state.hyperparameters_differ"
            yield seen.evidence(cause, Severity.ERROR, seen.ranks, what, numbers)

    def _minority(self, values: Sequence[float | int | None]) -> Sequence[int]:
        """Return the minority; without a majority, the earlier minority, if any."""
        odd = minority_ranks(values)
        before = sorted(self._settings.ranks.intersection(odd))
        undecided = len(odd) == sum(value is not None for value in values)
        return before if undecided and before else odd

    def _compare_calls(self, step: int, calls_W: Ints) -> Iterable[FaultEvidence]:
        """Judge the step before, which was not the last one."""
        before_W = self._waiting_calls
        number = self._waiting
        self._waiting = step
        self._waiting_calls = calls_W
        if number < 0:
            return
        known_W = before_W != MISSING_INT
        if np.count_nonzero(known_W) < 2:
            return
        ranks: tuple[int, ...] = ()
        if not _alike(before_W, known_W):
            values = known_values(before_W, known_W)
            ranks = minority_ranks(values)
            self._called = name_values(values, _times)
        seen = self._calls
        if seen.observe(number, ranks):
            called = {"called": self._called}
            others = {"other_causes": ["state.optimizer_differs"]}
            numbers = {"steps": seen.count, **called, **others}
            cause = "state.parameters_differ"
            yield seen.evidence(cause, Severity.ERROR, seen.ranks, called, numbers, key=CALLS)

    # Against the plan ----------------------------------------------------------------------

    def _follow_plan(self, gathered: GatheredStep, calls_W: Ints) -> Iterable[FaultEvidence]:
        calls = int(calls_W.max())
        rates_W = gathered.workers["lr"]
        known_W = (calls_W > 0) & ~np.isnan(rates_W) if len(self._planned_N) else _NOBODY
        if not known_W.any():
            self._num_calls += max(calls, 0)
            return
        rates = rates_W[known_W]
        if not self._anchored:
            self._anchor(rates, calls)
        at = self._num_calls + calls - 1
        self._num_calls += calls
        departs = self._departs(rates, at)
        if departs:
            self._departure = at, float(rates[0]), self._planned_at(at)
        if self._schedule.observe(gathered.step, (0,) if departs else ()):
            yield self._schedule_evidence()

    def _anchor(self, rates: Floats, calls: int) -> None:
        """Count on after a restart: from its end, or from an earlier checkpoint.

        That is the latest call of the plan, no later than the last, with this learning rate.
        """
        self._anchored = True
        last = self._num_calls + calls - 1
        if self._departs(rates, last):
            fits = np.flatnonzero(~self._depart(rates, self._planned_N[calls - 1 : last + 1]))
            if len(fits):
                self._num_calls = int(fits[-1])

    def _departs(self, rates: Floats, at: int) -> bool:
        """Return whether all these learning rates differ from the plan's for a call."""
        return bool(self._depart(rates, np.array([self._planned_at(at)]))[0])

    def _depart(self, rates: Floats, planned_N: Floats) -> Bools:
        """Return for each of these entries of the plan ``[N]`` whether all rates depart from it."""
        tolerance_N = _RELATIVE * planned_N + _OF_PEAK * self._peak
        return np.asarray((np.abs(rates[:, None] - planned_N) > tolerance_N).all(axis=0))

    def _planned_at(self, at: int) -> float:
        return float(self._planned_N[min(at, len(self._planned_N) - 1)])

    def _schedule_evidence(self) -> FaultEvidence:
        at, rate, planned = self._departure
        spell = _speller([rate, planned])
        words = {"at": f"{at:,}", "rate": spell(rate), "planned": spell(planned)}
        return self._schedule.evidence(
            "state.schedule",
            Severity.WARNING,
            (),
            words,
            {
                "steps": self._schedule.count,
                **words,
                "optimizer_step": at,
                "learning_rate": rate,
                "planned": planned,
            },
        )


def _calls(step: Step) -> Ints:
    """Return each worker's calls of the optimizer; unknown for one that takes no part in a step."""
    gathered = step.gathered
    calls_W: Ints = gathered.workers["optimizer_steps"].copy()
    if calls_W.all():
        return calls_W
    samples_W = gathered.workers["num_samples"]
    idle_W = (samples_W <= 0) & (calls_W == 0)
    if (samples_W > 0).any() and idle_W.any():
        calls_W[idle_W] = MISSING_INT
    return calls_W


def _alike(values_W: NDArray[np.float64 | np.int64], known_W: Bools) -> bool:
    known = values_W[known_W]
    return len(known) < 2 or bool((known == known[0]).all())


def _most_frequent(digests_W: Ints, among_W: Bools) -> Bools:
    """Return which workers have the most frequent value of some, the smallest of several."""
    values, counts = np.unique(digests_W[among_W], return_counts=True)
    return digests_W == values[counts.argmax()] if len(values) else among_W


def _speller(values: Iterable[float | None]) -> Callable[[float], str]:
    """Return a function that writes numbers in six digits, or in as many as separate these."""
    different = {value for value in values if value is not None}
    short = {f"{value:.6g}" for value in different}
    return (lambda value: f"{value:.6g}") if len(short) == len(different) else repr


def _times(calls: float) -> str:
    return ("never", "once", "twice")[int(calls)] if calls < 3 else f"{calls:,} times"


KEY = "seed-not-planned"


class PlannedSeed(Detector):
    """Compares the seed of each rank's sampler, as it was at the start, with the plan's."""

    SETTINGS = ("_planned", "_wrong")

    def __init__(self, planned: int | None, seeds: Sequence[int | None] = ()) -> None:
        self._planned = planned
        self._wrong = {
            rank: seed
            for rank, seed in enumerate(seeds)
            if None not in (planned, seed) and seed != planned
        }
        self._reported = False

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report with the first one after a start."""
        if self._reported or not self._wrong:
            return ()
        self._reported = True
        seeds = ", ".join(map(str, dict.fromkeys(self._wrong.values())))
        fields = {"planned": self._planned, "seeds": seeds}
        numbers = {"planned": self._planned, "seeds": list(self._wrong.values())}
        at = step.gathered.step
        cause = "state.schedule"
        return (evidence_at(at, cause, Severity.WARNING, self._wrong, fields, numbers, key=KEY),)


BY_PASS = "schedule-by-micro-batch"
ENDED = "schedule-ended"
JUMPS = "schedule-jumps"

_STEPS_BY_PASS = 8
_FALLS = 8  # of a rate that comes down in small steps
_RESTS = 32  # steps
_LOW = 0.1  # of its peak
_SHARE = 0.75  # of the steps before
_RECENT = 16  # steps
_FAR = 32.0  # times the largest change of these
_LEAST = 0.05  # of the rate


class ScheduleByPass(Detector):
    """A learning rate that changes with each micro-batch of a step, and not with each update."""

    def __init__(self) -> None:
        self._span = PersistentFault()
        self._num_micro = 0

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report where its rate moves with each micro-batch, from the eighth on."""
        workers = step.gathered.workers
        changes_W = workers["lr_changes"]
        micro_W = workers["micro_batches"]
        if not (micro_W > 1).all() or not (changes_W == micro_W - 1).all():
            return
        self._span.see(step.gathered.step)
        self._num_micro = max(self._num_micro, int(micro_W.max()))
        if self._span.count >= _STEPS_BY_PASS:
            yield self._span.evidence(
                "state.schedule",
                Severity.NOTE,
                (),
                {"micro": self._num_micro},
                {"steps": self._span.count, "micro_batches": self._num_micro},
                key=BY_PASS,
            )


class ScheduleEnded(Detector):
    """A learning rate that a schedule has brought down, and that rests there.

    A warning at 0, where nothing is learnt any more. A note at less than a tenth of its peak, once
    it has rested for three quarters as many steps as it took to come down.
    """

    def __init__(self) -> None:
        self._begin = -1
        self._peak = 0.0
        self._rate = math.nan
        self._falls = 0
        self._since = -1
        self._rests = 0
        self._span = PersistentFault()

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report where the rate has come to rest, and when it moves again."""
        workers = step.gathered.workers
        rate = float(workers["lr"][0])
        number = step.gathered.step
        if not step.alike("lr") or not (workers["optimizer_steps"] > 0).all():
            return
        if rate != self._rate:
            self._begin = number if self._begin < 0 else self._begin
            self._peak = max(self._peak, rate)
            self._falls += rate < self._rate
            self._since = number
            self._rests = 0
            self._rate = rate
            if self._span.close():
                yield self._evidence()
        self._rests += 1
        taken = self._since - self._begin
        long = self._rests >= (_RESTS if rate == 0 else max(_RESTS, _SHARE * taken))
        low = self._falls >= _FALLS and rate < _LOW * self._peak
        if low and long and not self._span.open:
            self._span.see(number, first=self._since, before=self._rests - 1)
            yield self._evidence()

    def _evidence(self) -> FaultEvidence:
        fields = {
            "rate": f"{self._rate:.3g}",
            "peak": f"{self._peak:.3g}",
            "taken": count(self._span.first - self._begin, "step"),
            "over": "" if self._span.open else " It moves again.",
        }
        severity = Severity.WARNING if self._rate == 0 else Severity.NOTE
        numbers = {"lr": self._rate, "peak": self._peak}
        return self._span.evidence("state.schedule", severity, (), fields, numbers, key=ENDED)


class ScheduleJump(Detector):
    """A learning rate that jumps where the training is started again.

    It jumps if it changes by 32 times as much as in any of the 16 steps before, and by a twentieth.
    """

    def __init__(self) -> None:
        self._rate = math.nan
        self._changes: list[float] = []
        self._restarted = False

    def restore(self, state: State) -> None:
        """Continue from the state of another detector; StateError if it does not fit."""
        super().restore(state)
        self._restarted = True

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report a jump in the first one after a restart."""
        workers = step.gathered.workers
        if not step.alike("lr") or not (workers["optimizer_steps"] > 0).all():
            return
        before, self._rate = self._rate, float(workers["lr"][0])
        change = abs(self._rate - before)
        usual = max(self._changes, default=math.inf)
        restarted, self._restarted = self._restarted, False
        if not math.isnan(change):
            self._changes = [*self._changes[1 - _RECENT :], change]
        far = change > max(_FAR * usual, _LEAST * max(before, self._rate))
        if restarted and far and len(self._changes) >= _FALLS:
            yield evidence_at(
                step.gathered.step,
                "state.schedule",
                Severity.NOTE,
                (),
                {"before": f"{before:.4g}", "rate": f"{self._rate:.4g}", "usual": f"{usual:.2g}"},
                {"lr_before": before, "lr": self._rate, "largest_change": usual},
                key=JUMPS,
            )

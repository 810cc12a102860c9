"""The detectors of learning rates whose schedule moves too fast, or is over too early."""

import math
from collections.abc import Iterable

from rankscope.bus.detector import Detector, FaultEvidence, PersistentFault
from rankscope.bus.finding import Severity
from rankscope.bus.steps import Step
from rankscope.bus.words import count
from rankscope.stats.state import State

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
            span = PersistentFault()
            span.see(step.gathered.step)
            yield span.evidence(
                "state.schedule",
                Severity.NOTE,
                (),
                {"before": f"{before:.4g}", "rate": f"{self._rate:.4g}", "usual": f"{usual:.2g}"},
                {"lr_before": before, "lr": self._rate, "largest_change": usual},
                key=JUMPS,
            )

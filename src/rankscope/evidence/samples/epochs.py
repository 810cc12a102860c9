"""The detectors of epochs that all have the same order, and of padding at an epoch's end.

A sampler without ``set_epoch`` deals the same batches in the same order in each epoch. No worker
differs from another then, and no metric of a single step shows it.

Samples that a sampler repeats at an epoch's end, so that all workers have equally many, are no
fault. They explain repeats in the record.
"""

from collections.abc import Iterable

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence, PersistentFault
from rankscope.bus.finding import Severity
from rankscope.bus.step import MISSING_INT
from rankscope.bus.steps import Step
from rankscope.bus.words import count
from rankscope.evidence.samples.repeats import FEW
from rankscope.stats.arrays import Ints
from rankscope.stats.samples import SampleCounts
from rankscope.stats.sorted_map import count_common, in_order
from rankscope.stats.state import Stateful


class PeriodFinder(Stateful):
    """Counts steps in a row whose batches came before, all ``period`` steps ago.

    ``run`` is the number of these steps, from ``first`` on; 0 if the last one's did not.
    """

    def __init__(self) -> None:
        self._earliest = 0
        self.period = 0
        self.run = 0
        self.first = -1

    def restart(self, step: int) -> None:
        """Compare with no step before this one from now on."""
        self._earliest = step
        self.period = self.run = 0

    def observe(self, step: int, before: int) -> None:
        """Process a step, in order; ``before`` is the latest one with the same batches, or -1."""
        if before < self._earliest:
            self.period = self.run = 0
        elif step - before == self.period:
            self.run += 1
        else:
            self.period = step - before
            self.run = 1
            self.first = step


_LEAST_STEPS = 8
_SHARE = 4  # of a period must have come again


class RepeatedOrder(Detector):
    """The batches of all workers come again in the same order.

    A step's batch is identified by the digests of all workers' batches in the order of ranks. It
    must have come before with one constant period, in 8 steps in a row and in a quarter of the
    period. So a single batch that comes twice proves nothing. Exact for periods up to 2^19 steps.

    Steps are not compared across a restart: a job that begins again from an older checkpoint
    repeats some of them, as it should.

    Args:
        repeats: Whether the training means to repeat its batches.
    """

    SETTINGS = ("_intended",)

    def __init__(self, *, repeats: bool = False) -> None:
        self._intended = repeats
        self._finder = PeriodFinder()
        self._ended = False
        self._on_purpose = 0
        self._span = PersistentFault()
        self._period = -1
        self._severity = Severity.NOTE

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step's batches; report while they come again in the same order."""
        gathered = step.gathered
        digests_W = gathered.workers["batch_digest"]
        if self._ended:
            self._ended = False
            self._on_purpose = 0
            self._finder.restart(gathered.step)
        if not step.some_known("batch_digest"):
            return ()
        ages_W = step.recurrence.ages_W
        again_W = ((ages_W > 0) & (ages_W < FEW)) | (digests_W == MISSING_INT)
        self._on_purpose = self._on_purpose + 1 if again_W.all() else 0
        finder = self._finder
        finder.observe(gathered.step, step.recurrence.before)
        if finder.run < max(_LEAST_STEPS, finder.period / _SHARE):
            return ()
        few = finder.period < FEW or self._on_purpose >= finder.run
        severity = Severity.NOTE if few or self._intended else Severity.WARNING
        if not self._span.count or severity > self._severity:
            self._span = PersistentFault()
            self._period = finder.period
            self._severity = severity
        self._span.see(gathered.step, first=finder.first, before=finder.run - 1)
        return (self._evidence(),)

    def close(self) -> Iterable[FaultEvidence]:
        """End the run; a step after this is one of a restarted job."""
        self._ended = True
        return ()

    def _evidence(self) -> FaultEvidence:
        span = self._span
        return span.evidence(
            "data.repeated_order",
            self._severity,
            (),
            {"before": f"{span.first - self._period:,}", "period": count(self._period, "step")},
            {"period": self._period, "repeated_steps": span.count},
        )


KEY = "padding-duplicates"

_NONE = np.empty(0, np.int64)


class Padding(Stateful):
    """Detects padding at the end of the first epoch, where repeats begin.

    A step with some new samples and a few repeats is padded if no step before it repeats any, the
    next one draws nothing new, so a new epoch has begun, and the repeats are fewer than workers,
    or all come from the epoch's first step.

    Args:
        num_workers: W.
    """

    SETTINGS = ("_num_workers",)

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._start = _NONE
        self._looking = num_workers > 1
        self._repeats = 0
        self._step = -1

    def observe(self, step: int, counts: SampleCounts, samples: Ints) -> Iterable[FaultEvidence]:
        """Process a step's samples and their counts; report once, after the first epoch's end."""
        if not self._looking or not counts.drawn:
            return ()
        if self._repeats:
            found = () if counts.new else self.end_epoch()
            self._looking = False
            self._start = _NONE
            return found
        repeats = counts.drawn - counts.new
        if repeats:
            few = repeats < self._num_workers
            of_the_start = count_common(samples, self._start) == repeats
            self._looking = counts.new > 0 and (few or of_the_start)
            self._repeats = repeats
            self._step = step
        if not len(self._start):
            self._start = in_order(samples)
        return ()

    def end_epoch(self) -> Iterable[FaultEvidence]:
        """Report the padding of the last step, if any: a new epoch has begun."""
        padded = self._looking and self._repeats > 0
        self._looking = self._looking and not padded
        return (self._evidence(),) if padded else ()

    def _evidence(self) -> FaultEvidence:
        return FaultEvidence(
            cause="data.overlapping_shards",
            severity=Severity.NOTE,
            ranks=(),
            first_step=self._step,
            last_step=self._step,
            count=1,
            fields={"step": f"{self._step:,}", "repeats": count(self._repeats, "sample")},
            numbers={"repeated": self._repeats},
            key=KEY,
        )

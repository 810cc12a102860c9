"""The detector of workers whose number of micro-batches differs from the others'."""

from collections.abc import Iterable

from rankscope.bus.detector import Detector, FaultEvidence, PersistentFault
from rankscope.bus.finding import Severity
from rankscope.bus.replicas import minority_ranks, name_values
from rankscope.bus.steps import Step

_SURE = 16


class UnequalMicroBatches(Detector):
    """Numbers of micro-batches that differ between workers, the same in most steps.

    Numbers that differ now and then are healthy: an epoch ends with fewer on some workers, or
    batches are cut by tokens, and the numbers change from step to step. So steps vote (Boyer and
    Moore, 1991): each one counts for the usual numbers, or against them. Sixteen more steps for
    than against are needed.

    Args:
        num_workers: W.
    """

    SETTINGS = ("_num_workers",)

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._usual: tuple[int, ...] = ()
        self._votes = 0
        self._since = -1
        self._first: dict[tuple[int, ...], int] = {}  # steps, of those seen since all was usual
        self._span = PersistentFault()
        self._reported: tuple[int, ...] = ()

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report numbers that differ in most steps, and the end of that."""
        if self._num_workers < 2 or not step.all_known("micro_batches"):
            return ()
        number = step.gathered.step
        counts = tuple(step.gathered.workers["micro_batches"].tolist())
        self._vote(counts, number)
        if self._votes < _SURE or counts != self._usual:
            return ()
        if len(set(counts)) > 1:
            if self._reported != counts:
                self._span = PersistentFault()
                self._reported = counts
            self._span.see(number, first=self._since, before=number - self._since)
            return (self._evidence(),)
        return (self._evidence(),) if self._span.close() else ()

    def _vote(self, counts: tuple[int, ...], step: int) -> None:
        if counts == self._usual:
            self._votes = min(self._votes + 1, _SURE)
            if self._votes == _SURE:
                self._first = {}
            return
        if len(self._first) < _SURE:
            self._first.setdefault(counts, step)
        if self._votes:
            self._votes -= 1
        else:
            self._usual = counts
            self._votes = 1
            self._since = self._first.get(counts, step)

    def _evidence(self) -> FaultEvidence:
        return self._span.evidence(
            "data.micro_batches",
            Severity.WARNING,
            minority_ranks(self._reported),
            {"what": name_values(self._reported)},
            {"steps": self._span.count, "micro_batches": list(self._reported[:64])},
        )

"""The detector of whole batches that are the same on two or more workers."""

from collections.abc import Iterable

from rankscope.bus.detector import Detector, FaultEvidence
from rankscope.bus.finding import Severity
from rankscope.bus.persistent_fault import PersistentFault
from rankscope.bus.steps import Step
from rankscope.bus.words import count
from rankscope.stats.sorted_map import in_order

_RARE = 0.1
"""Groups that coincide in a smaller share of the steps of the most frequent one are not named."""


class DuplicateBatches(Detector):
    """Whole batches that are the same on two or more workers.

    Small batches can coincide by chance, so at least three different samples must coincide, in
    one step or in consecutive steps of the same workers.

    Args:
        num_workers: W.
        repeats: Whether workers are meant to repeat each other's samples.
    """

    SETTINGS = ("_num_workers", "_repeats")

    def __init__(self, num_workers: int, *, repeats: bool = False) -> None:
        self._num_workers = num_workers
        self._repeats = repeats
        self._streaks: dict[tuple[int, ...], tuple[int, int]] = {}
        self._groups: dict[tuple[int, ...], int] = {}
        self._useful = num_workers
        self._span = PersistentFault()

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report identical batches once enough samples coincide."""
        number = step.gathered.step
        samples = step.gathered.samples
        if not step.identical:
            self._streaks = {}
            return ()
        streaks: dict[tuple[int, ...], tuple[int, int]] = {}
        certain: list[tuple[int, ...]] = []
        for group in step.identical:
            first, coincidences = self._streaks.get(group, (number, 0))
            coincidences += len(in_order(samples[group[0]]))
            streaks[group] = first, coincidences
            if coincidences >= 3:
                certain.append(group)
        self._streaks = streaks
        if not certain:
            return ()
        self._span.see(number, first=min(streaks[group][0] for group in certain))
        for group in certain:
            self._groups[group] = self._groups.get(group, 0) + 1
        self._useful = self._num_workers - sum(len(group) - 1 for group in certain)
        return (self._evidence(),)

    def _evidence(self) -> FaultEvidence:
        most = max(self._groups.values())
        usual = sorted(group for group, n in self._groups.items() if n >= _RARE * most)
        ranks = {rank for group in usual for rank in group}
        return self._span.evidence(
            "data.duplicate_batches",
            Severity.NOTE if self._repeats else Severity.ERROR,
            ranks,
            {"workers": self._num_workers, "useful": count(self._useful, "worker")},
            {
                "steps": self._span.count,
                "groups": [list(group) for group in usual[:16]],
                "workers_with_own_batches": self._useful,
            },
        )

"""The detector of whole batches that are the same on two or more workers."""

import math
from collections.abc import Iterable, Mapping

from rankscope.bus.detector import Detector, FaultEvidence, PersistentFault
from rankscope.bus.finding import Severity
from rankscope.bus.steps import SharedWork, Step
from rankscope.bus.words import count, name_ranks
from rankscope.stats.sorted_map import in_order

SAME_RESULTS = "data-same-results"
PARTS = "data-parts-of-one-model"
"""Key of batches that are known to be the same by what came of them."""

_RARE = 0.1
_STEPS_OF_PARTS = 3
_MOST_NAMED = 4
"""Groups that coincide in a smaller share of the steps of the most frequent one are not named."""


class DuplicateBatches(Detector):
    """Whole batches that are the same on two or more workers.

    Small batches can coincide by chance, so at least three different samples must coincide, in
    one step or in consecutive steps of the same workers.

    Workers that share the work on each sample are no duplicates, as in graph or context parallelism
    under a wrapper over all ranks: they fall into groups of one size, each of which has one loss,
    and gradients that differ. Where the training's own loop reduces, as in tensor parallelism that
    is written by hand, one group may be all workers; that is a note.

    Args:
        num_workers: W.
        repeats: Whether workers are meant to repeat each other's samples.
        by_loop: Whether the training's own loop reduces.
    """

    SETTINGS = ("_num_workers", "_repeats", "_by_loop")

    _key = ""

    def __init__(self, num_workers: int, *, repeats: bool = False, by_loop: bool = False) -> None:
        self._num_workers = num_workers
        self._repeats = repeats
        self._by_loop = by_loop
        self._parts = PersistentFault(_STEPS_OF_PARTS)
        self._streaks: dict[tuple[int, ...], tuple[int, int]] = {}
        self._groups: dict[tuple[int, ...], int] = {}
        self._useful = num_workers
        self._sharing = SharedWork()
        self._span = PersistentFault()

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report identical batches once enough samples coincide."""
        samples = step.gathered.samples
        groups = step.identical
        if groups and self._share_samples(step):
            groups = ()
            everyone = range(self._num_workers) if self._by_loop else ()
            if self._parts.observe(step.gathered.step, everyone):
                return (self._parts_evidence(),)
        found = {group: len(in_order(samples[group[0]])) for group in groups}
        return self._observe(step.gathered.step, found)

    def _observe(
        self, number: int, found: Mapping[tuple[int, ...], int]
    ) -> Iterable[FaultEvidence]:
        """Process the groups of workers that coincide in a step, and in how much."""
        if not found:
            self._streaks = {}
            return ()
        streaks: dict[tuple[int, ...], tuple[int, int]] = {}
        certain: list[tuple[int, ...]] = []
        for group, more in found.items():
            first, coincidences = self._streaks.get(group, (number, 0))
            coincidences += more
            streaks[group] = first, coincidences
            if coincidences >= 3:
                certain.append(group)
        self._streaks = streaks
        if not certain:
            return ()
        first = min(streaks[group][0] for group in certain)
        self._span.see(number, first=first, before=number - first)
        for group in certain:
            self._groups[group] = self._groups.get(group, 0) + 1
        self._useful = self._num_workers - sum(len(group) - 1 for group in certain)
        return (self._evidence(),)

    def _share_samples(self, step: Step) -> bool:
        """Return whether all workers share the work on samples with others."""
        groups = self._sharing.observe(step)
        whole = self._sharing.places(self._num_workers) is not None
        return groups == step.identical and whole and (len(groups) > 1 or self._by_loop)

    def _parts_evidence(self) -> FaultEvidence:
        groups = self._sharing.groups
        names = [name_ranks(group) for group in groups[:_MOST_NAMED]]
        more = [count(len(groups) - _MOST_NAMED, "other group")] if groups[_MOST_NAMED:] else []
        return self._parts.evidence(
            "data.duplicate_batches",
            Severity.NOTE,
            self._parts.ranks,
            {"groups": "; ".join([*names, *more])},
            {"steps": self._parts.count, "groups": [list(group) for group in groups[:16]]},
            key=PARTS,
        )

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
            key=self._key,
        )


class SameResults(DuplicateBatches):
    """Workers with the same loss and the same gradient, to the last bit, in steps without samples.

    Their samples are not seen, as where the training calls a method of the model and never the
    model itself. Three steps must coincide: of different batches none does.
    """

    _key = SAME_RESULTS

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report workers whose results coincide."""
        gathered = step.gathered
        if not gathered.observed or any(map(len, gathered.samples)):
            return ()
        ranks_of: dict[tuple[float, float], list[int]] = {}
        columns = gathered.workers["loss"].tolist(), gathered.workers["grad_norm"].tolist()
        for rank, results in enumerate(zip(*columns, strict=True)):
            if all(map(math.isfinite, results)) and results[1] > 0:
                ranks_of.setdefault(results, []).append(rank)
        found = {tuple(ranks): 1 for ranks in ranks_of.values() if len(ranks) > 1}
        return self._observe(gathered.step, found)

"""The detector of whole batches that are the same on two or more workers."""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence
from rankscope.bus.finding import Severity
from rankscope.bus.persistent_fault import PersistentFault
from rankscope.bus.steps import Groups, Step
from rankscope.bus.words import count
from rankscope.stats.arrays import Floats
from rankscope.stats.sorted_map import in_order

SAME_RESULTS = "data-same-results"
"""Key of batches that are known to be the same by what came of them."""

_RARE = 0.1
"""Groups that coincide in a smaller share of the steps of the most frequent one are not named."""


_SAME_LOSS = 1e-5
_OTHER_NORM = 2e-5  # more than another order of sums makes


class DuplicateBatches(Detector):
    """Whole batches that are the same on two or more workers.

    Small batches can coincide by chance, so at least three different samples must coincide, in
    one step or in consecutive steps of the same workers.

    Workers that share the work on each sample are no duplicates, as in graph or context parallelism
    under a wrapper over all ranks: they fall into groups of one size, each of which has one loss,
    and gradients that differ.

    Args:
        num_workers: W.
        repeats: Whether workers are meant to repeat each other's samples.
    """

    SETTINGS = ("_num_workers", "_repeats")

    _key = ""

    def __init__(self, num_workers: int, *, repeats: bool = False) -> None:
        self._num_workers = num_workers
        self._repeats = repeats
        self._streaks: dict[tuple[int, ...], tuple[int, int]] = {}
        self._groups: dict[tuple[int, ...], int] = {}
        self._useful = num_workers
        self._sharing: Groups = ()  # of workers that share the work on each sample
        self._span = PersistentFault()

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report identical batches once enough samples coincide."""
        samples = step.gathered.samples
        groups = () if self._share_samples(step) else step.identical
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
        groups = step.identical
        if not groups:
            return False
        workers = step.gathered.workers
        norms_W = workers["grad_norm"]
        if np.isfinite(norms_W).all():
            size = len(groups[0])
            whole = len(groups) > 1 and all(len(group) == size for group in groups)
            whole &= size * len(groups) == len(norms_W)
            losses_W = workers["loss"]
            shared = whole and all(
                _spread(losses_W[list(group)]) <= _SAME_LOSS
                and _spread(norms_W[list(group)]) > _OTHER_NORM
                for group in groups
            )
            self._sharing = groups if shared else ()
        return bool(self._sharing) and self._sharing == groups

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


def _spread(values: Floats) -> float:
    """Return the range of some values over the largest; NaN where one is unknown."""
    largest = float(np.abs(values).max())
    return float(np.ptp(values)) / largest if largest else 0.0

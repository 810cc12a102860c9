"""The detectors of batches that several workers train on at the same time."""

from collections.abc import Iterable, Mapping

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence, PersistentFault
from rankscope.bus.finding import Severity
from rankscope.bus.replicas import ranks_by
from rankscope.bus.steps import SharedWork, Step
from rankscope.bus.words import count, name_ranks, shortened
from rankscope.stats.arrays import MISSING_INT
from rankscope.stats.draws import in_order

SAME_RESULTS = "data-same-results"
"""Key of batches that are known to be the same by their results."""
PARTS = "data-parts-of-one-model"
"""Key of batches that are the same since workers hold parts of one model."""

_RARE = 0.1
"""Groups that coincide in a smaller share of the steps of the most frequent one are not named."""
_STEPS_OF_PARTS = 3
_MOST_NAMED = 4


class DuplicateBatches(Detector):
    """Whole batches that are the same on two or more workers.

    Small batches can coincide by chance, so at least three different samples must coincide, in
    one step or in consecutive steps of the same workers.

    Workers that share the work on each sample are no duplicates, as in graph or context parallelism
    under a wrapper over all ranks: they fall into groups of one size, each of which has one loss,
    and gradients that differ. Where the training's own loop reduces, as in tensor parallelism that
    is written by hand, one group may be all workers; that is a note.
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
        self._sure = False  # whether ids that the training gives are not all that coincides

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report identical batches once enough samples coincide."""
        samples = step.gathered.samples
        groups = tuple(group for group in step.identical if _tell_apart(step, group))
        if groups and self._share_samples(step):
            groups = ()
            everyone = range(self._num_workers) if self._by_loop else ()
            if self._parts.observe(step.gathered.step, everyone):
                return (self._parts_evidence(),)
        found = {group: len(in_order(samples[group[0]])) for group in groups}
        return self._observe(step.gathered.step, found, doubtful=_in_doubt(step, groups))

    def _observe(
        self, number: int, found: Mapping[tuple[int, ...], int], *, doubtful: bool = False
    ) -> Iterable[FaultEvidence]:
        """Process the groups of workers that coincide in a step, and in how much."""
        if not found:
            self._streaks = {}
            return ()
        self._sure = self._sure or not doubtful
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
        names = [name_ranks(group) for group in groups]
        return self._parts.evidence(
            "data.duplicate_batches",
            Severity.NOTE,
            self._parts.ranks,
            {"groups": shortened(names, _MOST_NAMED, "other group", between="; ")},
            {"steps": self._parts.count, "groups": [list(group) for group in groups[:16]]},
            key=PARTS,
        )

    def _evidence(self) -> FaultEvidence:
        most = max(self._groups.values())
        usual = sorted(group for group, n in self._groups.items() if n >= _RARE * most)
        ranks = {rank for group in usual for rank in group}
        severity = Severity.ERROR if self._sure else Severity.WARNING
        severity = Severity.NOTE if self._repeats else severity
        return self._span.evidence(
            "data.duplicate_batches",
            severity,
            ranks,
            {"workers": self._num_workers, "useful": count(self._useful, "worker")},
            {
                "steps": self._span.count,
                "groups": [list(group) for group in usual[:16]],
                "workers_with_own_batches": self._useful,
            },
            key=self._key,
        )


def _tell_apart(step: Step, group: tuple[int, ...]) -> bool:
    """Return whether the samples of a batch that is the same on some workers may be its identity.

    Of numbers such as the graph of each node, half of a batch and more are repeats. Other losses
    show then that the rest of the batch differs.
    """
    batch = step.gathered.samples[group[0]]
    rows_W, losses_W = (step.gathered.workers[name] for name in ("rows_digest", "loss"))
    if 2 * len(in_order(batch)) > len(batch) or (rows_W != MISSING_INT).all():
        return True
    return np.unique(losses_W[list(group)]).size == 1


def _in_doubt(step: Step, groups: Iterable[tuple[int, ...]]) -> bool:
    """Return whether workers with the same ids from the training have different losses.

    Dropout explains that, and so do ids that are places in each worker's own shard.
    """
    rows_W, losses_W = (step.gathered.workers[name] for name in ("rows_digest", "loss"))
    if not step.all_true("samples_named") or (rows_W != MISSING_INT).all():
        return False
    return all(np.unique(losses_W[list(group)]).size > 1 for group in groups)


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
        losses_W = gathered.workers["loss"]
        norms_W = gathered.workers["grad_norm"]
        known_W = np.isfinite(losses_W) & np.isfinite(norms_W) & (norms_W > 0)
        results = zip(losses_W.tolist(), norms_W.tolist(), known_W.tolist(), strict=True)
        groups = ranks_by((loss, norm) if known else None for loss, norm, known in results)
        found = {tuple(ranks): 1 for ranks in groups.values() if len(ranks) > 1}
        return self._observe(gathered.step, found)

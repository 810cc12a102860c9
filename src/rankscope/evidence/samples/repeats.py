"""The detectors of batches that are the same: on several workers, again, in each epoch.

A sampler without ``set_epoch`` deals the same batches in the same order in each epoch. No worker
differs from another then, and no metric of a single step shows it.

Samples that a sampler repeats at an epoch's end, so that all workers have equally many, are no
fault. They explain repeats in the record.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from rankscope.bus.detector import (
    Detector,
    FaultEvidence,
    PersistentFault,
    RestartDetector,
    evidence_at,
)
from rankscope.bus.finding import Severity
from rankscope.bus.replicas import ranks_by
from rankscope.bus.step import MISSING_INT
from rankscope.bus.steps import Recurrence, SharedWork, Step
from rankscope.bus.words import count, name_ranks, shortened
from rankscope.stats.arrays import Ints, mix
from rankscope.stats.draws import count_common, in_order
from rankscope.stats.samples import SampleCounts
from rankscope.stats.state import Stateful

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
        losses_W, norms_W = gathered.workers["loss"], gathered.workers["grad_norm"]
        known_W = np.isfinite(losses_W) & np.isfinite(norms_W) & (norms_W > 0)
        results = zip(losses_W.tolist(), norms_W.tolist(), known_W.tolist(), strict=True)
        groups = ranks_by((loss, norm) if known else None for loss, norm, known in results)
        found = {tuple(ranks): 1 for ranks in groups.values() if len(ranks) > 1}
        return self._observe(gathered.step, found)


FEW = 16
"""So few batches that a worker with no others learns them by heart."""

_STEPS_NEEDED = 24
_STEPS_OF_PROCESSES = 8
_SMALLEST = 4  # samples: fewer are soon the same by chance
_ORDINARY = 9  # batches to one that is filled; with more filled ones, such inputs are intended
_MOST_FILLERS = 64


class RepeatedBatches(Detector):
    """Workers that meet the same few batches again and again, while others go on to new ones.

    In 24 steps in a row each batch of the worker is one of its last 16, and at least half of the
    workers have new ones. Where all repeat their batches, it is an overfitting test or a small
    data set; and a worker that meets a batch of the epoch before by chance does not do so 24 times
    in a row.
    """

    SETTINGS = ("_num_workers", "_intended")

    def __init__(self, num_workers: int, *, repeats: bool = False) -> None:
        self._num_workers = num_workers
        self._intended = repeats
        self._seen = PersistentFault(_STEPS_NEEDED, in_a_row=True)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step's batches; report while a worker repeats its own, and the end of it."""
        if self._num_workers < 2 or not step.some_known("batch_digest"):
            return ()
        digests_W = step.gathered.workers["batch_digest"]
        ages_W = step.recurrence.ages_W
        again_W = (ages_W > 0) & (ages_W <= FEW)
        new_W = (digests_W != MISSING_INT) & ~again_W
        others_go_on = 2 * np.count_nonzero(new_W) >= self._num_workers
        ranks = np.flatnonzero(again_W).tolist() if others_go_on else ()
        changed = self._seen.observe(step.gathered.step, ranks)
        return (self._evidence(step.recurrence),) if changed else ()

    def _evidence(self, recurrence: Recurrence) -> FaultEvidence:
        seen = self._seen
        few = max(recurrence.num_distinct(worker, FEW) for worker in seen.ranks)
        return seen.evidence(
            "data.repeated_batches",
            Severity.NOTE if self._intended else Severity.WARNING,
            seen.ranks,
            {"batches": count(few, "batch", "batches")},
            {"steps": seen.count, "batches": few},
        )


STALE = "stale-samples"
"""Key of samples that a worker trains on again at once."""

_STALE_STEPS = 8
_MOST_WORKERS = 1024  # that are looked at: the root's time grows with the samples of a step


class StaleSamples(Detector):
    """Workers that train again on samples of the same step or the one before; others never do.

    So does a prefetched batch that is handed out twice. In eight steps of a worker, four different
    samples or more come again at once; some other worker has no such step. All workers have them
    where batches are meant to be used again, or where data or shards are tiny.
    """

    SETTINGS = ("_num_workers", "_intended")

    def __init__(self, num_workers: int, *, intended: bool = False) -> None:
        self._num_workers = num_workers
        self._intended = intended
        self._last = np.empty(0, np.uint64)  # the last step's samples, each with its worker
        self._steps_W = np.zeros(num_workers, np.int64)
        self._most = 0  # samples
        self._span = PersistentFault(_STALE_STEPS)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step's samples; report workers that alone train on some again."""
        samples = step.gathered.samples
        lengths_W = np.array([len(each) for each in samples])
        if self._intended or not 2 <= self._num_workers <= _MOST_WORKERS or not lengths_W.all():
            self._last = self._last[:0]
            return ()
        workers = np.repeat(np.arange(self._num_workers), lengths_W)
        drawn = mix(np.concatenate(samples)) ^ mix(workers)
        drawn, first, times = np.unique(drawn, return_index=True, return_counts=True)
        again = (times > 1) | np.isin(drawn, self._last, assume_unique=True)
        again_W = np.bincount(workers[first[again]], minlength=self._num_workers)
        self._last = drawn
        self._steps_W += again_W > 0
        ranks = np.flatnonzero(again_W >= _SMALLEST).tolist() if (self._steps_W == 0).any() else ()
        changed = self._span.observe(step.gathered.step, ranks)
        self._most = max([self._most, *again_W[list(ranks)].tolist()])
        return (self._evidence(),) if changed and self._span.count else ()

    def _evidence(self) -> FaultEvidence:
        samples = f"up to {count(self._most, 'sample')}"
        numbers = {"steps": self._span.count, "samples": self._most}
        over = "" if self._span.open else " That is over."
        others = name_ranks(np.flatnonzero(self._steps_W == 0).tolist())
        return self._span.evidence(
            "data.repeated_batches",
            Severity.WARNING,
            self._span.ranks,
            {"samples": samples, "others": others, "over": over},
            numbers,
            key=STALE,
        )


PROCESSES = "loader-processes"


class LoaderProcesses(Detector):
    """Data loaders whose processes all read the whole stream: each batch comes once from each."""

    def __init__(self) -> None:
        self._seen = PersistentFault(_STEPS_OF_PROCESSES)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report batches that come from each process, and the end of it."""
        repeats_W = step.gathered.workers["loader_repeats"]
        ranks = np.flatnonzero((repeats_W != MISSING_INT) & (repeats_W > 0)).tolist()
        if not self._seen.observe(step.gathered.step, ranks):
            return ()
        seen = self._seen
        cause = "data.repeated_batches"
        numbers = {"steps": seen.count}
        return (seen.evidence(cause, Severity.WARNING, seen.ranks, {}, numbers, key=PROCESSES),)


class FilledBatches(Detector):
    """Batches of four samples or more, all of which are the same one, among ordinary batches.

    Lost data leave such batches: zeros, or one sample in place of those that could not be read. A
    batch without a label that counts only keeps workers in step, and is passed over. Where a step
    has several micro-batches, a batch is one of them.
    """

    SETTINGS = ("_intended",)

    def __init__(self, *, repeats: bool = False) -> None:
        self._intended = repeats
        self._ordinary = self._filled = self._size = 0
        self._times: dict[int, int] = {}  # that a sample has filled a batch
        self._ranks: set[int] = set()
        self._span = PersistentFault()

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step's samples; report batches that are filled with one of them."""
        samples = step.gathered.samples
        if step.columns.samples.all_differ(step.index):
            self._ordinary += sum(len(batch) >= _SMALLEST for batch in samples)
            return ()
        columns = step.gathered.workers
        found = False
        for rank, batch in enumerate(samples):
            size = len(batch) // max(1, int(columns["micro_batches"][rank]))
            if size < _SMALLEST or columns["loss_weight"][rank] == 0:
                continue
            filler = _filler(batch, size)
            if filler is None:
                self._ordinary += 1
            else:
                self._add(rank, filler, size)
                found = True
        if not found or self._filled * _ORDINARY > self._ordinary:
            return ()
        self._span.see(step.gathered.step)
        return (self._evidence(),)

    def _add(self, rank: int, filler: int, size: int) -> None:
        self._filled += 1
        self._size = size
        self._ranks.add(rank)
        if filler in self._times or len(self._times) < _MOST_FILLERS:
            self._times[filler] = self._times.get(filler, 0) + 1

    def _evidence(self) -> FaultEvidence:
        most = max(self._times.values())
        sure = most > 1 and not self._intended
        return self._span.evidence(
            "data.filled_batches",
            Severity.WARNING if sure else Severity.NOTE,
            self._ranks,
            {"batches": count(self._filled, "batch", "batches")},
            {
                "batches": self._filled,
                "samples_of_a_batch": self._size,
                "filled_by_one_sample": most,
                "steps": self._span.count,
            },
        )


def _filler(samples: Ints, size: int) -> int | None:
    """Return the sample that is drawn at least ``size`` times; None if there is none."""
    ordered = np.sort(samples)
    again = ordered[size - 1 :] == ordered[: len(ordered) - size + 1]
    return int(ordered[again.argmax()]) if again.any() else None


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
_SHUFFLE = {
    "nothing": "The sampler does not shuffle. If it should, let it (shuffle=True), and call "
    "set_epoch(epoch) before each epoch where it has that method.",
    "set_epoch": "Call set_epoch(epoch) before each epoch on what shuffles: the sampler, the batch "
    "sampler or the data set.",
    "generator": "The sampler's generator begins each epoch from the same state: seed it once, "
    "before the first epoch. The sampler has no set_epoch.",
}
_SHUFFLE_SOMEHOW = (
    "Where something shuffles, call its set_epoch(epoch) before each epoch, or do not seed its "
    "generator anew. Where nothing does, shuffle the data."
)


class RepeatedOrder(RestartDetector):
    """The batches of all workers come again in the same order.

    A step's batch is identified by the digests of all workers' batches in the order of ranks. It
    must have come before with one constant period, in 8 steps in a row and in a quarter of the
    period. So a single batch that comes twice proves nothing. Exact for periods up to 2^19 steps.

    Steps are not compared across a restart: a job that begins again from an older checkpoint
    repeats some of them, as it should.
    """

    SETTINGS = ("_intended", "_order")

    def __init__(self, *, repeats: bool = False, order: str = "") -> None:
        super().__init__()
        self._intended = repeats
        self._order = order
        self._finder = PeriodFinder()
        self._on_purpose = 0
        self._span = PersistentFault()
        self._period = -1
        self._severity = Severity.NOTE

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step's batches; report while they come again in the same order."""
        gathered = step.gathered
        digests_W = gathered.workers["batch_digest"]
        if self._restarts():
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

    def _evidence(self) -> FaultEvidence:
        span = self._span
        return span.evidence(
            "data.repeated_order",
            self._severity,
            (),
            {
                "before": f"{span.first - self._period:,}",
                "period": count(self._period, "step"),
                "Shuffle": _SHUFFLE.get(self._order, _SHUFFLE_SOMEHOW),
            },
            {"period": self._period, "repeated_steps": span.count},
        )


KEY = "padding-duplicates"

_NONE = np.empty(0, np.int64)


class Padding(Stateful):
    """Detects padding at the end of the first epoch, where repeats begin.

    A step with some new samples and a few repeats is padded if no step before it repeats any, the
    next one draws nothing new, so a new epoch has begun, and the repeats are fewer than workers,
    or all come from the epoch's first step.
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
        fields = {"step": f"{self._step:,}", "repeats": count(self._repeats, "sample")}
        numbers = {"repeated": self._repeats}
        cause = "data.overlapping_shards"
        return evidence_at(self._step, cause, Severity.NOTE, (), fields, numbers, key=KEY)

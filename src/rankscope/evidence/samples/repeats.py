"""The detectors of batches and samples that a worker trains on again.

Batches that come again in the same order are in :mod:`rankscope.evidence.samples.orders`.
"""

from collections.abc import Iterable

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence, PersistentFault
from rankscope.bus.finding import Severity
from rankscope.bus.steps import Recurrence, Step
from rankscope.bus.words import count, name_ranks
from rankscope.stats.arrays import MISSING_INT, Ints, mix

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

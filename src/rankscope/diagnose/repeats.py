"""Batches that came before, and batches of one sample."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.words import count
from rankscope.core.arrays import Ints
from rankscope.core.finding import Severity
from rankscope.core.state import Stateful
from rankscope.core.step import MISSING_INT, GatheredStep
from rankscope.diagnose.evidence import Detector, Evidence, Observation
from rankscope.diagnose.lasting import Lasting, Span

Bools = NDArray[np.bool_]

FEW = 16
"""Batches that are so few that a worker that meets no others knows them by heart."""

_OF_A_WORKER = 64
_OF_ALL = 4096
_STEPS_NEEDED = 24
_SMALLEST = 4  # samples: fewer are soon the same by chance
_ORDINARY = 9  # batches to one that is filled; where more are, the training's inputs are made so
_MOST_FILLERS = 64


class RecentBatches(Stateful):
    """Remembers the last batches of every worker.

    A worker that meets one of them again knows it by heart.

    Args:
        num_workers: W.
        most: How many batches of each are remembered.
    """

    def __init__(self, num_workers: int, most: int = _OF_A_WORKER) -> None:
        self._recent_WN = np.full((num_workers, most), MISSING_INT, np.int64)
        self._count = 0

    def observe(self, digests_W: Ints) -> Bools:
        """Take one step; return for each worker ``[W]`` whether its batch is one of its last ones.

        Args:
            digests_W: One per worker, ``MISSING_INT`` where samples are unknown: then it is not.
        """
        known_W = digests_W != MISSING_INT
        repeated_W: Bools = (self._recent_WN == digests_W[:, None]).any(axis=1) & known_W
        self._recent_WN[:, self._count % self._recent_WN.shape[1]] = digests_W
        self._count += 1
        return repeated_W

    def num_distinct(self, worker: int) -> int:
        """Return how many different ones of a worker are remembered."""
        recent_N = self._recent_WN[worker]
        return len(np.unique(recent_N[recent_N != MISSING_INT]))

    def observe_many(self, digests_TW: Ints) -> bool:
        """Take several steps in which no batch is one of a worker's last ones.

        Returns:
            Whether it is so; else nothing has changed, and :meth:`observe` has to be asked.
        """
        most = self._recent_WN.shape[1]
        if len(digests_TW) > most:
            return False
        together = np.concatenate([self._recent_WN, digests_TW.T], axis=1)
        together.sort(axis=1)
        again = (together[:, 1:] == together[:, :-1]) & (together[:, 1:] != MISSING_INT)
        if again.any():
            return False
        places = (self._count + np.arange(len(digests_TW))) % most
        self._recent_WN[:, places] = digests_TW.T
        self._count += len(digests_TW)
        return True


class Repeats(Stateful):
    """Tells whether a step's batches came before.

    A batch that comes again with the same micro-batches is not a new draw: what it shows was
    decided when it first came.

    Args:
        num_workers: W.
    """

    SETTINGS = ("_factors_W",)

    def __init__(self, num_workers: int) -> None:
        self._factors_W = 2 * np.arange(num_workers, dtype=np.int64) + 1
        self._recent = RecentBatches(num_workers)
        self._steps_N = np.full(_OF_ALL, MISSING_INT, np.int64)
        self._count = 0

    def observe(self, gathered: GatheredStep) -> bool:
        """Take one step.

        Returns:
            Whether a worker's batch is one of its last 64, or all workers' batches together are
            those of one of the last 4,096 steps. False where samples are unknown.
        """
        digests_W = gathered.workers["batch_digest"]
        if (digests_W == MISSING_INT).all():
            return False
        all_of_them = int(digests_W.dot(self._factors_W))  # wraps around, as it should
        repeated_W = self._recent.observe(digests_W)
        repeated = bool(repeated_W.any() or (self._steps_N == all_of_them).any())
        self._steps_N[self._count % _OF_ALL] = all_of_them
        self._count += 1
        return repeated


class RepeatedBatches(Detector):
    """Workers that meet the same few batches again and again, while others go on to new ones.

    In 24 steps in a row each batch of the worker is one of its last 16, and at least half of the
    workers have new ones. Where all repeat their batches, it is a test whether they can be learnt
    by heart, or a small data set; and a worker that meets a batch of the epoch before by chance
    does not do so 24 times in a row.

    Args:
        num_workers: W.
        repeats: Whether the training means to repeat its batches.
    """

    SETTINGS = ("_num_workers", "_intended")

    def __init__(self, num_workers: int, *, repeats: bool = False) -> None:
        self._num_workers, self._intended = num_workers, repeats
        self._recent = RecentBatches(num_workers, FEW)
        self._seen = Lasting(_STEPS_NEEDED, in_a_row=True)

    def observe(self, step: Observation) -> Iterable[Evidence]:
        """Take the batches of one step; speaks while a worker repeats its own, and at the end."""
        if self._num_workers < 2 or not step.some_known("batch_digest"):
            return ()
        digests_W = step.gathered.workers["batch_digest"]
        again_W = self._recent.observe(digests_W)
        new_W = (digests_W != MISSING_INT) & ~again_W
        others_go_on = 2 * np.count_nonzero(new_W) >= self._num_workers
        ranks = np.flatnonzero(again_W).tolist() if others_go_on else ()
        return (self._evidence(),) if self._seen.observe(step.gathered.step, ranks) else ()

    def _evidence(self) -> Evidence:
        seen = self._seen
        few = max(map(self._recent.num_distinct, seen.ranks))
        return seen.evidence(
            "data.repeated_batches",
            Severity.NOTE if self._intended else Severity.WARNING,
            seen.ranks,
            {"batches": count(few, "batch", "batches")},
            {"steps": seen.count, "batches": few},
        )


class FilledBatches(Detector):
    """Batches of four samples or more, all of which are the same one, among ordinary batches.

    That is what is left of data that were lost on their way: zeros, or a sample that stands for
    those that could not be read. A batch of which no label counts keeps workers in step, and is
    passed over. Where a step has several micro-batches, a batch is one of them.

    Args:
        repeats: Whether the training means to repeat its samples.
    """

    SETTINGS = ("_intended",)

    def __init__(self, *, repeats: bool = False) -> None:
        self._intended = repeats
        self._ordinary = self._filled = self._size = 0
        self._times: dict[int, int] = {}  # that a sample has filled a batch
        self._ranks: set[int] = set()
        self._span = Span()

    def observe(self, step: Observation) -> Iterable[Evidence]:
        """Take the samples of one step; speaks of batches that are filled with one of them."""
        samples = step.gathered.samples
        if step.stretch.samples.all_differ(step.index):
            self._ordinary += sum(len(batch) >= _SMALLEST for batch in samples)
            return ()
        columns, found = step.gathered.workers, False
        for rank, batch in enumerate(samples):
            size = len(batch) // max(1, int(columns["micro_batches"][rank]))
            if size < _SMALLEST or columns["loss_weight"][rank] == 0:
                continue
            filler = _filler(batch, size)
            if filler is None:
                self._ordinary += 1
            else:
                self._take(rank, filler, size)
                found = True
        if not found or self._filled * _ORDINARY > self._ordinary:
            return ()
        self._span.see(step.gathered.step)
        return (self._evidence(),)

    def _take(self, rank: int, filler: int, size: int) -> None:
        self._filled += 1
        self._size = size
        self._ranks.add(rank)
        if filler in self._times or len(self._times) < _MOST_FILLERS:
            self._times[filler] = self._times.get(filler, 0) + 1

    def _evidence(self) -> Evidence:
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

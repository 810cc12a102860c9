"""Batches that came before."""

import numpy as np
from numpy.typing import NDArray

from rankscope.core.arrays import Ints
from rankscope.core.state import Stateful
from rankscope.core.step import MISSING_INT, GatheredStep

Bools = NDArray[np.bool_]

_OF_A_WORKER = 64
_OF_ALL = 4096


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

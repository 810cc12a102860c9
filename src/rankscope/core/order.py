"""Finds out whether a stream of batches repeats itself with one constant period.

A batch is an int64 digest. Exact over the last 2^19 steps at least, and up to 2^20.
"""

import numpy as np

from rankscope.core.arrays import Ints
from rankscope.core.sorted_map import SortedMap
from rankscope.core.state import Stateful
from rankscope.core.step import MISSING_INT

_GENERATION = 1 << 19


class PeriodFinder(Stateful):
    """Counts how many steps in a row came before, all the same number of steps ago.

    Remembers 12 bytes per step, in two generations: when the younger one is full, the older one
    is forgotten.

    Args:
        generation: Steps of one generation.
    """

    SETTINGS = ("_generation",)

    def __init__(self, generation: int = _GENERATION) -> None:
        self._generation = generation
        self._young = SortedMap(np.int32)
        self._old = SortedMap(np.int32)
        self._earliest = 0
        self.period = 0
        self.run = 0
        self.first = -1

    def restart(self, step: int) -> None:
        """From this step on, compare with no step before it."""
        self._earliest = step
        self.period = self.run = 0

    def observe(self, step: int, digest: int) -> None:
        """Take the batch of one step, in order.

        Afterwards ``run`` steps in a row, from ``first`` on, repeat those ``period`` steps before
        them; 0 when this one does not.
        """
        latest = self._young.get(digest), self._old.get(digest)
        before = max(-1 if at is None else at for at in latest)
        self._remember(digest, step)
        if before < self._earliest:
            self.period = self.run = 0
        elif step - before == self.period:
            self.run += 1
        else:
            self.period, self.run, self.first = step - before, 1, step

    def _remember(self, digest: int, step: int) -> None:
        if len(self._young) >= self._generation:
            self._young, self._old = self._old, self._young
            self._young.keep(lambda keys: np.zeros(len(keys), bool))
        self._young.put_one(digest, step)


class ShortCycles(Stateful):
    """Tells whether every worker is going round in a few batches of its own.

    Args:
        num_workers: W.
        most: Batches of a worker that count as few.
    """

    def __init__(self, num_workers: int, most: int) -> None:
        self._recent_WN = np.full((num_workers, most), MISSING_INT, np.int64)
        self._count = 0

    def observe(self, digests_W: Ints) -> bool:
        """Take one step; return whether each worker's batch is one of its last few.

        Args:
            digests_W: One per worker, ``MISSING_INT`` where it is unknown.
        """
        again_W = (self._recent_WN == digests_W[:, None]).any(axis=1)
        self._recent_WN[:, self._count % self._recent_WN.shape[1]] = digests_W
        self._count += 1
        return bool((again_W | (digests_W == MISSING_INT)).all())

"""Earlier batches, remembered for all detectors.

Legend of shapes: T steps, N remembered steps, W workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.bus.replicas import digest_of_digests
from rankscope.bus.step import MISSING_INT
from rankscope.stats.arrays import Ints
from rankscope.stats.draws import SortedMap
from rankscope.stats.state import Stateful

REMEMBERED = 64
"""Remembered batches of every worker."""

_GENERATION = 1 << 19


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Whether the batches of a step came before.

    Attributes:
        ages_W: How many steps ago each worker had the same batch; 0 where unknown, or not among
            the last 64.
        before: The latest step in which all workers had their present batches; -1 without.
        recent_NW: The digests of the last batches of every worker, this step's the last of them.
    """

    ages_W: Ints
    before: int
    recent_NW: Ints

    def num_distinct(self, worker: int, most: int) -> int:
        """Return how many of a worker's last ``most`` batches are distinct."""
        recent_N = self.recent_NW[-most:, worker]
        return len(np.unique(recent_N[recent_N != MISSING_INT]))


class RecentBatches(Stateful):
    """Remembers the last batches of every worker, and in which steps all of them came together.

    A step without any known batch is passed over. Of the steps, 12 bytes each are remembered in two
    generations: when the younger one is full, the older one is forgotten.

    Args:
        num_workers: W.
        generation: Steps of one generation.
    """

    SETTINGS = ("_generation",)

    def __init__(self, num_workers: int, generation: int = _GENERATION) -> None:
        self._generation = generation
        self._recent_NW = np.full((REMEMBERED, num_workers), MISSING_INT, np.int64)
        self._young = SortedMap(np.int32)
        self._old = SortedMap(np.int32)

    def observe(self, digests_TW: Ints, steps: Sequence[int]) -> list[Recurrence]:
        """Process consecutive steps; return for each whether its batches came before.

        ``digests_TW`` holds a digest of each worker's batch, ``MISSING_INT`` where it is unknown.
        """
        known_T = (digests_TW != MISSING_INT).any(axis=1)
        history = np.concatenate([self._recent_NW, digests_TW[known_T]])
        self._recent_NW = history[-REMEMBERED:].copy()
        nothing = Recurrence(np.zeros(digests_TW.shape[1], np.int64), -1, history[:0])
        found = []
        end = REMEMBERED
        for digests_W, step, known in zip(digests_TW, steps, known_T.tolist(), strict=True):
            if not known:
                found.append(nothing)
                continue
            ages_W = _ages(history[end - REMEMBERED : end], digests_W)
            end += 1
            before = self._latest(digest_of_digests(digests_W), step)
            found.append(Recurrence(ages_W, before, history[end - REMEMBERED : end]))
        return found

    def _latest(self, digest: int, step: int) -> int:
        """Return the latest step with this digest, and remember this one in its place."""
        latest = self._young.get(digest), self._old.get(digest)
        if len(self._young) >= self._generation:
            self._young, self._old = self._old, self._young
            self._young.keep(lambda keys: np.zeros(len(keys), bool))
        self._young.put_one(digest, step)
        return max(-1 if at is None else at for at in latest)


def _ages(recent_NW: Ints, digests_W: Ints) -> Ints:
    """Return how many steps ago each worker had its batch, 0 if not among the recent ones."""
    same_NW = recent_NW == digests_W
    same_NW &= digests_W != MISSING_INT
    if not same_NW.any():
        return np.zeros(len(digests_W), np.int64)
    return np.where(same_NW.any(axis=0), same_NW[::-1].argmax(axis=0) + 1, 0)

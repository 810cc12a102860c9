"""How many different samples a run has drawn, in bounded memory.

Exact until ``CAPACITY`` different ones were drawn. From then on one sample in ``2^k`` is followed,
see :mod:`rankscope.core.share`. With n of them, the i-th drawn cᵢ times, of D draws in all, there
are about ``2^k·n`` different ones, and ``2^k·Σcᵢ`` stands for the D that is known. So

    2^k·n + λ·(D − 2^k·Σcᵢ)    with    λ = Σcᵢ / Σcᵢ²

is an estimate whose variance is proportional to ``Σ(1 − λcᵢ)²``, which this λ makes least (the
regression estimator of sampling theory). Its standard error is about ``1/√n`` at most, 0.5 %; it is
exact when no sample repeats, or all do equally often. Where the last bracket is larger than chance
makes it, a sample that is drawn very often is not among those that are followed: then λ is 0.
"""

import math

import numpy as np
from numpy.typing import NDArray

from rankscope.core.arrays import Ints
from rankscope.core.share import SampleShare, mix

CAPACITY = 1 << 16


class DistinctSamples:
    """Counts draws, and how many different samples are among them.

    Attributes:
        drawn: All draws so far.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.drawn = 0
        self._capacity = capacity
        self._share = SampleShare()
        self._hashes = np.empty(0, np.int64)
        self._draws = np.empty(0, np.int64)
        self._waiting: list[NDArray[np.int64]] = []
        self._num_waiting = 0

    @property
    def is_exact(self) -> bool:
        """Whether every sample is followed."""
        self._settle()
        return not self._share.halvings

    def add(self, samples: Ints) -> None:
        """Take draws: ids or digests."""
        self.drawn += len(samples)
        hashes = mix(samples).view(np.int64)
        admitted = hashes[self._share.admits_hashes(hashes)]
        self._waiting.append(admitted)
        self._num_waiting += len(admitted)
        if self._num_waiting >= self._capacity:
            self._settle()

    def distinct(self) -> int:
        """Return the number of different samples, or its estimate."""
        self._settle()
        if not len(self._draws):
            return 0
        count, draws = len(self._draws), self._draws.astype(np.float64)
        squares = float(np.square(draws).sum())
        rest = self.drawn - self._share.one_in * float(draws.sum())
        usual = abs(rest) <= 3 * self._share.one_in * math.sqrt(squares)
        slope = float(draws.sum()) / squares if usual else 0.0
        return int(np.clip(round(self._share.one_in * count + slope * rest), count, self.drawn))

    def _settle(self) -> None:
        if not self._waiting:
            return
        new = np.concatenate(self._waiting)
        draws = np.concatenate([self._draws, np.ones(len(new), np.int64)])
        self._hashes, at = np.unique(np.concatenate([self._hashes, new]), return_inverse=True)
        self._draws = np.bincount(at, draws, len(self._hashes)).astype(np.int64)
        self._waiting, self._num_waiting = [], 0
        while len(self._hashes) > self._capacity and self._share.can_halve:
            self._share.halve()
            kept = self._share.admits_hashes(self._hashes)
            self._hashes, self._draws = self._hashes[kept], self._draws[kept]

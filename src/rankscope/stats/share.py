"""A share of all samples, drawn by their hashes, which is followed when all are too many.

Whether a sample belongs to the share depends on its hash alone. So it is followed in every epoch
and on every worker or never, and overlaps show in the share as they do in the whole.

How many different samples a run has drawn is exact until ``CAPACITY`` different ones were drawn.
From then on one sample in ``2^k`` is followed. With n of them, the i-th drawn cᵢ times, of D draws
in all, there are about ``2^k·n`` different ones, and ``2^k·Σcᵢ`` stands for the D that is known. So

    2^k·n + λ·(D − 2^k·Σcᵢ)    with    λ = Σcᵢ / Σcᵢ²

is an estimate whose variance is proportional to ``Σ(1 − λcᵢ)²``, which this λ makes least (the
regression estimator of sampling theory). Its standard error is about ``1/√n`` at most, 0.5 %; it is
exact when no sample repeats, or all do equally often. Where the last bracket is larger than chance
makes it, a sample that is drawn very often is not among those that are followed: then λ is 0.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.arrays import Ints, mix
from rankscope.stats.state import Stateful

Bools = NDArray[np.bool_]

MAX_HALVINGS = 20
"""The smallest share is one sample in a million: enough for 10^12 different ones."""


class SampleShare(Stateful):
    """One sample in ``2^k``: those whose hash begins with k zero bits; all, to begin with.

    Example:
        >>> share = SampleShare()
        >>> share.halve()
        >>> share.halve()
        >>> followed = int(share.admits(np.arange(10_000)).sum())
        >>> share.one_in, followed, [round(number) for number in share.scale_up(followed)]
        (4, 2495, [9980, 173])
    """

    def __init__(self) -> None:
        self.halvings = 0

    @property
    def one_in(self) -> int:
        """Number of samples that each sample of the share stands for."""
        return 1 << self.halvings

    @property
    def can_halve(self) -> bool:
        """Whether a smaller share is left."""
        return self.halvings < MAX_HALVINGS

    def halve(self) -> None:
        """Halve the share."""
        self.halvings += 1

    def admits(self, samples: Ints) -> Bools:
        """Return which samples belong to the share."""
        if not self.halvings:
            return np.ones(len(samples), bool)
        return self.admits_hashes(mix(samples).view(np.int64))

    def admits_hashes(self, hashes: Ints) -> Bools:
        """Return which samples belong to the share, from their hashes by :func:`mix`."""
        if not self.halvings:
            return np.ones(len(hashes), bool)
        found: Bools = hashes.view(np.uint64) >> np.uint64(64 - self.halvings) == 0
        return found

    def of(self, samples: Sequence[Ints]) -> list[Ints]:
        """Return the samples of the share, for each worker."""
        if not self.halvings or not samples:
            return list(samples)
        lengths = [len(batch) for batch in samples]
        flat = np.concatenate(samples).astype(np.int64, copy=False)
        admitted = self.admits(flat)
        ends = np.concatenate([[0], np.cumsum(admitted)])[np.cumsum(lengths)]
        return np.split(flat[admitted], ends[:-1])

    def scale_up(self, followed: int) -> tuple[float, float]:
        """Return how many different samples there are, and the standard error of that number.

        Each belongs to the share with probability ``p = 2^-k``: ``n/p`` with a variance of
        ``n(1-p)/p²``.

        Args:
            followed: n, different samples of the share.
        """
        p = 1 / self.one_in
        return followed / p, math.sqrt(followed * (1 - p)) / p


CAPACITY = 1 << 16


class DistinctSamples:
    """Counts draws, and how many different samples are among them.

    Attributes:
        drawn: All draws so far.

    Example:
        >>> drawn = DistinctSamples()
        >>> for _ in range(3):
        ...     drawn.add(np.arange(100))
        >>> drawn.drawn, drawn.distinct(), drawn.is_exact
        (300, 100, True)
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
        """Add draws: ids or digests."""
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
        count = len(self._draws)
        draws = self._draws.astype(np.float64)
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
        self._waiting = []
        self._num_waiting = 0
        while len(self._hashes) > self._capacity and self._share.can_halve:
            self._share.halve()
            kept = self._share.admits_hashes(self._hashes)
            self._hashes = self._hashes[kept]
            self._draws = self._draws[kept]

"""The samples that consecutive steps draw, sorted once for all detectors.

Where all samples are too many, a share of them is followed, drawn by their hashes. Whether a sample
belongs to the share depends on its hash alone. So it is followed in every epoch and on every worker
or never, and overlaps show in the share as they do in the whole.

How many different samples a run has drawn is exact until ``CAPACITY`` different ones were drawn.
From then on one sample in ``2^k`` is followed. With n of them, the i-th drawn cᵢ times, of D draws
in all, there are about ``2^k·n`` different ones, and ``2^k·Σcᵢ`` stands for the D that is known. So

    2^k·n + λ·(D − 2^k·Σcᵢ)    with    λ = Σcᵢ / Σcᵢ²

is an estimate whose variance is proportional to ``Σ(1 − λcᵢ)²``, which this λ makes least (the
regression estimator of sampling theory). Its standard error is about ``1/√n`` at most, 0.5 %; it is
exact when no sample repeats, or all do equally often. Where the last bracket is larger than chance
makes it, a sample that is drawn very often is not among those that are followed: then λ is 0.

Legend of shapes: S steps, D draws in all of them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.arrays import Bools, Ints, mix
from rankscope.stats.state import Stateful

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

    def scale_up(self, followed: int) -> tuple[float, float]:
        """Return how many different samples there are, and the standard error of that number.

        Each belongs to the share with probability ``p = 2^-k``: ``n/p`` with a variance of
        ``n(1-p)/p²``, where n of the share are ``followed``.
        """
        p = 1 / self.one_in
        return followed / p, math.sqrt(followed * (1 - p)) / p


CAPACITY = 1 << 16


class DistinctSamples:
    """Counts draws, and how many different samples are among them.

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
        self._waiting: list[Ints] = []
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


Admits = Callable[[Ints], Bools]


class SortedMap(Stateful):
    """A growing map from int64 to integers, kept in a few sorted arrays of doubling sizes."""

    SETTINGS = ("_value_type",)

    def __init__(self, value_type: type[np.signedinteger[Any]]) -> None:
        self._value_type = value_type
        self._runs: list[tuple[Ints, NDArray[Any]]] = []

    def __len__(self) -> int:
        return sum(len(keys) for keys, _ in self._runs)

    def find(self, keys: Ints) -> tuple[Bools, NDArray[Any]]:
        """Return which keys are in the map, and their values; fastest when they are sorted."""
        found = np.zeros(len(keys), bool)
        values = np.zeros(len(keys), self._value_type)
        for run_values, here, at in self._places(keys):
            found |= here
            values[here] = run_values[at]
        return found, values

    def get(self, key: int) -> int | None:
        """Return the value of one key, None when it is not in the map."""
        place = self._place(key)
        return None if place is None else int(place[0][place[1]])

    def replace(self, keys: Ints, values: NDArray[Any]) -> None:
        """Change the values of keys that are in the map."""
        for run_values, here, at in self._places(keys):
            run_values[at] = values[here]

    def add(self, keys: Ints, values: NDArray[Any]) -> None:
        """Add sorted keys that are not in the map yet."""
        if not len(keys):
            return
        all_keys = [keys]
        all_values = [values.astype(self._value_type)]
        size = len(keys)
        while self._runs and len(self._runs[-1][0]) <= 2 * size:
            run_keys, run_values = self._runs.pop()
            all_keys.append(run_keys)
            all_values.append(run_values)
            size += len(run_keys)
        if len(all_keys) == 1:
            self._runs.append((keys.copy(), all_values[0]))
            return
        merged = np.concatenate(all_keys)
        order = merged.argsort(kind="stable")  # sorted runs: merged, not sorted
        self._runs.append((merged[order], np.concatenate(all_values)[order]))

    def keep(self, admitted: Admits) -> None:
        """Forget all keys but those for which ``admitted`` is true."""
        kept = [(keys, values, admitted(keys)) for keys, values in self._runs]
        self._runs = [(keys[here], values[here]) for keys, values, here in kept if here.any()]

    def values(self) -> NDArray[Any]:
        """Return the values of all keys, in no order."""
        runs = (values for _, values in self._runs)
        return np.concatenate([np.empty(0, self._value_type), *runs])

    def fill(self, value: int) -> None:
        """Give all keys one value."""
        for _, values in self._runs:
            values[:] = value

    def put(self, keys: Ints, values: NDArray[Any]) -> tuple[Bools, NDArray[Any]]:
        """Set the values of sorted keys, which may be in the map or not.

        Returns, as :meth:`find`, which keys were in the map before, and their values then.
        """
        found = np.zeros(len(keys), bool)
        before = np.zeros(len(keys), self._value_type)
        for run_values, here, at in self._places(keys):
            found |= here
            before[here] = run_values[at]
            run_values[at] = values[here]
        if not found.all():
            self.add(keys[~found], values[~found])
        return found, before

    def put_one(self, key: int, value: int) -> None:
        """Set the value of one key, which may be in the map or not."""
        place = self._place(key)
        if place is None:
            self.add(np.array([key], np.int64), np.array([value]))
        else:
            run_values, at = place
            run_values[at] = value

    def _places(self, keys: Ints) -> Iterator[tuple[NDArray[Any], Bools, Ints]]:
        """Yield, for each run that has some of the keys: its values, which keys, and where."""
        for run_keys, run_values in self._runs:
            at = run_keys.searchsorted(keys)
            here = run_keys.take(at, mode="clip") == keys
            if here.any():
                yield run_values, here, at[here]

    def _place(self, key: int) -> tuple[NDArray[Any], int] | None:
        """Return the values of the run that has a key, and where; None when no run has it."""
        for run_keys, run_values in self._runs:
            at = int(run_keys.searchsorted(key))
            if at < len(run_keys) and run_keys[at] == key:
                return run_values, at
        return None


def count_common(keys: Ints, others: Ints) -> int:
    """Return how many of some keys are among others."""
    if not len(others):
        return 0
    ordered = np.sort(others)
    return int(np.count_nonzero(ordered.take(ordered.searchsorted(keys), mode="clip") == keys))


def in_order(keys: Ints) -> Ints:
    """Return the different ones of some keys, sorted."""
    ordered = np.sort(keys)
    new = ordered[1:] != ordered[:-1]
    return ordered if new.all() else ordered[np.concatenate(([True], new))]


_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Draws:
    """Draws of steps that share no sample, in the order of samples, then of workers."""

    samples: Ints  # the samples ``[D]``
    ranks: Ints  # the workers that draw them ``[D]``
    steps: Ints  # the steps in which they do, by index ``[D]``
    shape: tuple[int, int]  # how many steps and workers there are

    def where(self, which_D: Bools) -> "Draws":
        """Return some of the draws."""
        return Draws(self.samples[which_D], self.ranks[which_D], self.steps[which_D], self.shape)

    def of_steps(self, values_D: Ints) -> list[Ints]:
        """Return the draws' values, step by step."""
        if self.shape[0] == 1:
            return [values_D]
        by_step_D = self.steps.argsort(kind="stable")
        lengths_S = np.bincount(self.steps, minlength=self.shape[0])
        return np.split(values_D[by_step_D], np.cumsum(lengths_S)[:-1])


class DrawnSamples:
    """The samples of consecutive steps.

    ``steps``: of each step, one int64 array per worker, in rank order.
    """

    def __init__(self, steps: Sequence[Sequence[Ints]]) -> None:
        self._steps = steps

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> Sequence[Ints]:
        """Return each worker's samples in a step."""
        return self._steps[index]

    @cached_property
    def flat(self) -> Ints:
        """All samples ``[D]``, step by step and worker by worker."""
        parts = [batch for samples in self._steps for batch in samples]
        return np.concatenate([_NONE, *parts]).astype(np.int64, copy=False)

    @cached_property
    def lengths(self) -> Ints:
        """How many samples each step draws ``[S]``."""
        return np.array([sum(map(len, samples)) for samples in self._steps], np.int64)

    @cached_property
    def step_of_draw(self) -> Ints:
        """The index of each draw's step ``[D]``."""
        return np.arange(len(self._steps)).repeat(self.lengths)

    @cached_property
    def rank_of_draw(self) -> Ints:
        """The rank of each draw's worker ``[D]``."""
        lengths = [len(batch) for samples in self._steps for batch in samples]
        ranks = [rank for samples in self._steps for rank in range(len(samples))]
        return np.array(ranks, np.int64).repeat(lengths)

    @cached_property
    def order(self) -> Ints:
        """Indices that sort ``flat``; equal samples in the order of their draws."""
        order = self.flat.argsort()
        differ = differs_from_previous(self.flat[order])
        return order if differ.all() else self.flat.argsort(kind="stable")

    @cached_property
    def no_repeats(self) -> bool:
        """Whether no sample is drawn twice in all these steps."""
        return bool(differs_from_previous(self.flat[self.order]).all())

    def all_differ(self, index: int) -> bool:
        """Return whether no sample is drawn twice in a step."""
        return self.no_repeats or self._all_differ[index]

    @cached_property
    def _all_differ(self) -> list[bool]:
        samples = self.flat[self.order]
        steps = self.step_of_draw[self.order]
        twice = (samples[1:] == samples[:-1]) & (steps[1:] == steps[:-1])
        counts_S = np.bincount(steps[1:][twice], minlength=len(self))
        return list((counts_S == 0).tolist())

    def pieces(self) -> "Iterator[DrawnSamples]":
        """Yield runs of consecutive steps that share no sample, each as long as possible."""
        if len(self) < 2 or self.no_repeats:
            yield self
            return
        start = 0
        for index, latest in enumerate(self._latest()):
            if latest >= start:
                yield DrawnSamples(self._steps[start:index])
                start = index
        yield DrawnSamples(self._steps[start:])

    def after(self, index: int) -> "DrawnSamples":
        """Return the steps after one of them."""
        return DrawnSamples(self._steps[index + 1 :])

    def fitting_pieces(self, fits: Callable[[Ints], bool]) -> "Iterator[DrawnSamples]":
        """Yield the pieces whose samples fit, and the steps of the others one by one."""
        for piece in self.pieces():
            if len(piece) < 2 or fits(piece.flat):
                yield piece
            else:
                yield from (DrawnSamples([step]) for step in piece._steps)

    def _latest(self) -> list[int]:
        """Return, for each step, the latest one before it that draws one of its samples, or -1."""
        samples = self.flat[self.order]
        steps = self.step_of_draw[self.order]
        again = (samples[1:] == samples[:-1]) & (steps[1:] != steps[:-1])
        latest_S = np.full(len(self), -1)
        np.maximum.at(latest_S, steps[1:][again], steps[:-1][again])
        return list(latest_S.tolist())

    def sorted(self, which_D: Bools | None = None) -> Draws:
        """Return the draws, or some of them, in the order of samples.

        ``which_D``: which, in the order of ``flat``. No two steps share one of their samples.
        """
        order = self.order if which_D is None else self.order[which_D[self.order]]
        shape = len(self), max(map(len, self._steps), default=0)
        return Draws(self.flat[order], self.rank_of_draw[order], self.step_of_draw[order], shape)

    def in_steps(self, which_D: Bools) -> list[Ints]:
        """Return some of the samples, step by step and worker by worker."""
        if len(self) == 1:
            return [self.flat[which_D]]
        lengths_S = np.bincount(self.step_of_draw[which_D], minlength=len(self))
        return np.split(self.flat[which_D], np.cumsum(lengths_S)[:-1])


def differs_from_previous(values: Ints) -> Bools:
    """Return which values differ from the one before; true for the first."""
    differs = np.ones(len(values), bool)
    differs[1:] = values[1:] != values[:-1]
    return differs

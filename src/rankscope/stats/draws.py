"""The samples that consecutive steps draw, sorted once for all detectors.

Legend of shapes: S steps, D draws in all of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.arrays import Ints

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Draws:
    """Draws of steps that share no sample, in the order of samples, then of workers.

    Attributes:
        samples: The samples ``[D]``.
        ranks: The workers that draw them ``[D]``.
        steps: The steps in which they do, by index ``[D]``.
        shape: How many steps and workers there are.
    """

    samples: Ints
    ranks: Ints
    steps: Ints
    shape: tuple[int, int]

    def where(self, which_D: NDArray[np.bool_]) -> "Draws":
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

    Args:
        steps: Of each step, one int64 array per worker, in rank order.
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

    def single_steps(self) -> "Iterator[DrawnSamples]":
        """Yield each step by itself."""
        for step in self._steps:
            yield DrawnSamples([step])

    def _latest(self) -> list[int]:
        """Return, for each step, the latest one before it that draws one of its samples, or -1."""
        samples = self.flat[self.order]
        steps = self.step_of_draw[self.order]
        again = (samples[1:] == samples[:-1]) & (steps[1:] != steps[:-1])
        latest_S = np.full(len(self), -1)
        np.maximum.at(latest_S, steps[1:][again], steps[:-1][again])
        return list(latest_S.tolist())

    def sorted(self, which_D: NDArray[np.bool_] | None = None) -> Draws:
        """Return the draws, or some of them, in the order of samples.

        Args:
            which_D: Which, in the order of ``flat``. No two steps share one of their samples.
        """
        order = self.order if which_D is None else self.order[which_D[self.order]]
        shape = len(self), max(map(len, self._steps), default=0)
        return Draws(self.flat[order], self.rank_of_draw[order], self.step_of_draw[order], shape)

    def in_steps(self, which_D: NDArray[np.bool_]) -> list[Ints]:
        """Return some of the samples, step by step and worker by worker."""
        if len(self) == 1:
            return [self.flat[which_D]]
        lengths_S = np.bincount(self.step_of_draw[which_D], minlength=len(self))
        return np.split(self.flat[which_D], np.cumsum(lengths_S)[:-1])


def differs_from_previous(values: Ints) -> NDArray[np.bool_]:
    """Return which values differ from the one before; true for the first."""
    differs = np.ones(len(values), bool)
    differs[1:] = values[1:] != values[:-1]
    return differs

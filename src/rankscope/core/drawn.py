"""What the workers draw in consecutive steps, put into order once for all who ask.

Legend of shapes: S steps, D draws in all of them.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from rankscope.core.arrays import Ints

_NONE = np.empty(0, np.int64)


class DrawnSamples:
    """The samples of consecutive steps.

    Args:
        steps: Of each step, one int64 array per worker, in rank order.
    """

    def __init__(self, steps: Sequence[Sequence[Ints]]) -> None:
        self._steps = steps

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

    def __len__(self) -> int:
        return len(self._steps)

    @cached_property
    def order(self) -> Ints:
        """Where the samples stand in ``flat``, in their order."""
        return self.flat.argsort()

    @cached_property
    def no_repeats(self) -> bool:
        """Whether no sample is drawn twice in all these steps."""
        ordered = self.flat[self.order]
        return not (ordered[1:] == ordered[:-1]).any()

    def all_differ(self, index: int) -> bool:
        """Return whether no sample is drawn twice in a step."""
        return self.no_repeats or self._all_differ[index]

    @cached_property
    def _all_differ(self) -> list[bool]:
        order = np.lexsort((self.flat, self.step_of_draw))
        samples, steps = self.flat[order], self.step_of_draw[order]
        twice = (samples[1:] == samples[:-1]) & (steps[1:] == steps[:-1])
        counts_S = np.bincount(steps[1:][twice], minlength=len(self._steps))
        return list((counts_S == 0).tolist())

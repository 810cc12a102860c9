"""A ledger of samples for epochs of any size: exact at first, then over a share of them.

Legend of shapes: S steps, D draws in all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rankscope.core.arrays import Ints
from rankscope.core.samples import Draws, SampleCounts, SampleLedger
from rankscope.core.share import SampleShare
from rankscope.core.state import Stateful

_NONE = np.empty(0, np.int64)


class DrawnSamples:
    """The samples of consecutive steps, put into order once for all who ask.

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


@dataclass(frozen=True, slots=True)
class Followed:
    """What is known of a step's samples.

    Attributes:
        counts: Those that are followed, counted.
        samples: Those that are followed, worker by worker.
        drawn: Samples drawn up to this step, by all workers together.
        remembered: Different samples that were remembered after it.
    """

    counts: SampleCounts
    samples: Ints
    drawn: int
    remembered: int


class ThinningLedger(Stateful):
    """Remembers who drew which samples, in bounded memory.

    Exact while no more than ``capacity`` different samples were drawn. Then it forgets half of
    them, chosen by their hashes, and follows the other half alone; and again whenever it is full.
    The share that is followed is a random sample of all, so what holds in it holds in the whole.

    Args:
        capacity: Different samples to remember.
    """

    def __init__(self, capacity: int = 1 << 20) -> None:
        self._ledger = SampleLedger(capacity)
        self._share = SampleShare()
        self._drawn = 0

    @property
    def drawn(self) -> int:
        """Samples drawn so far, by all workers together."""
        return self._drawn

    @property
    def one_in(self) -> int:
        """How many samples stand behind one that is followed; 1 as long as it is exact."""
        return self._share.one_in

    @property
    def followed(self) -> int:
        """Different samples that are remembered."""
        return self._ledger.distinct

    @property
    def complete(self) -> bool:
        """Whether every sample of the share was remembered; false only beyond 10^12 samples."""
        return self._ledger.exact

    def admit(self, samples: Sequence[Ints]) -> list[Ints]:
        """Return the samples of a step that are followed, after making room for them.

        Args:
            samples: One int64 array per worker, in rank order.
        """
        self._drawn += sum(map(len, samples))
        followed = self._share.of(samples)
        while self._is_full(followed) and self._share.can_halve:
            self._share.halve()
            self._ledger.thin(self._share)
            followed = self._share.of(followed)
        return followed

    def observe(self, step: int, followed: Sequence[Ints]) -> SampleCounts:
        """Count and remember the draws of one step; see :meth:`SampleLedger.observe`.

        Args:
            step: Step number; steps must come in order.
            followed: What :meth:`admit` returned for this step.
        """
        return self._ledger.observe(step, followed)

    def observe_many(self, drawn: DrawnSamples, num_workers: int) -> "list[Followed] | None":
        """Count and remember the draws of several steps together.

        Args:
            drawn: What they draw.
            num_workers: W.

        Returns:
            For each step the same as :meth:`admit` and :meth:`observe` of one after the other;
            None where these have to be asked, and nothing has changed.
        """
        if len(drawn) < 2 or not drawn.no_repeats:
            return None
        admitted_D = self._share.admits(drawn.flat)
        order = drawn.order[admitted_D[drawn.order]]
        if not self._ledger.has_room(len(order)):
            return None
        draws = Draws(drawn.flat[order], drawn.rank_of_draw[order], drawn.step_of_draw[order])
        distinct, exact = self._ledger.distinct, self._ledger.exact
        counts = self._ledger.observe_many(draws, len(drawn), num_workers)
        assert self._ledger.exact == exact, "there was room for all"
        followed = np.split(drawn.flat[admitted_D], np.cumsum([c.drawn for c in counts])[:-1])
        found = []
        for step_counts, samples, length in zip(
            counts, followed, drawn.lengths.tolist(), strict=True
        ):
            self._drawn += length
            distinct += step_counts.new
            found.append(Followed(step_counts, samples, self._drawn, distinct))
        return found

    def scale_up(self, followed: int) -> tuple[float, float]:
        """Return how many samples stand behind so many that are followed, and its error."""
        return self._share.scale_up(followed)

    def _is_full(self, followed: Sequence[Ints]) -> bool:
        room = self._ledger.capacity - self._ledger.distinct
        return sum(map(len, followed)) > room and self._ledger.count_new(followed) > room

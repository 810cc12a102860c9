"""A ledger of samples for epochs of any size: exact at first, then over a share of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rankscope.stats.arrays import Ints
from rankscope.stats.draws import DrawnSamples, Draws
from rankscope.stats.samples import SampleCounts, SampleLedger
from rankscope.stats.share import SampleShare
from rankscope.stats.state import Stateful


@dataclass(frozen=True, slots=True)
class Followed:
    """A step's samples, as far as they are followed.

    Attributes:
        counts: Counts of the followed samples.
        samples: The followed samples, worker by worker.
        drawn: Samples drawn up to this step, by all workers together.
        remembered: Different samples that were remembered after it.
    """

    counts: SampleCounts
    samples: Ints
    drawn: int
    remembered: int


class ThinningLedger(Stateful):
    """Remembers the samples of each worker, in bounded memory.

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
        """Number of samples that each followed one stands for; 1 while it is exact."""
        return self._share.one_in

    @property
    def followed(self) -> int:
        """Different samples that are remembered."""
        return self._ledger.distinct

    @property
    def complete(self) -> bool:
        """Whether every sample of the share was remembered; false only beyond 10^12 samples."""
        return self._ledger.exact

    def forget(self) -> None:
        """Forget all samples and draws; the share that is followed stays."""
        self._ledger = SampleLedger(self._ledger.capacity)
        self._drawn = 0

    def observe(self, drawn: DrawnSamples) -> Iterator[Followed]:
        """Count and remember the draws of consecutive steps, one with each iteration."""
        for piece in drawn.pieces():
            some = int(np.count_nonzero(self._share.admits(piece.flat)))
            together = len(piece) < 2 or self._ledger.has_room(some)
            for steps in (piece,) if together else piece.single_steps():
                yield from self._follow(steps)

    def _follow(self, drawn: DrawnSamples) -> Iterator[Followed]:
        """Process steps that share no sample: a single one, or several if there is room."""
        admitted_D = self._share.admits(drawn.flat)
        draws = drawn.sorted(admitted_D)
        while self._is_full(draws) and self._share.can_halve:
            self._share.halve()
            self._ledger.thin(self._share)
            admitted_D = self._share.admits(drawn.flat)
            draws = drawn.sorted(admitted_D)
        counts = self._ledger.observe(draws)
        remembered = self._ledger.distinct - sum(each.new for each in counts[1:])
        samples = drawn.in_steps(admitted_D)
        for index, (each, length) in enumerate(zip(counts, drawn.lengths.tolist(), strict=True)):
            self._drawn += length
            remembered += each.new if index else 0
            yield Followed(each, samples[index], self._drawn, remembered)

    def scale_up(self, followed: int) -> tuple[float, float]:
        """Return the number of samples that so many followed ones stand for, and its error."""
        return self._share.scale_up(followed)

    def _is_full(self, draws: Draws) -> bool:
        room = self._ledger.capacity - self._ledger.distinct
        return len(draws.samples) > room and self._ledger.count_new(draws) > room

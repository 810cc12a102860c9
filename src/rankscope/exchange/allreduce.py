"""An all-reduce in few rounds, as a schedule that moves no byte itself.

gloo's own all-reduce is a ring: 2(W−1) rounds, and a short vector falls into pieces of a few bytes
that each carry a header of 48. On 1,024 workers that is thousands of messages in a row for 9 kB.
Here a worker sends 2·⌈log2 W⌉ messages, for any W, and moves no more than a ring's data: on average
over workers ``2(1 − 1/W)n`` sent and as much received, the least that is possible; no worker more
than one value a message above that.

The values fall into W blocks. First half (reduce-scatter): with ``s`` halved from W down to 1,
worker r sends its partial sums of blocks r+s, r+s+1, … to worker r+s, gets such sums of its own
blocks r, r+1, … from worker r−s, and adds them up; in the end it holds the sum of block r. Second
half (all-gather): the same rounds backwards. Each block is summed in one place and then copied, so
all workers end with the same bits.

The method is that of J. L. Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms"
(2024).
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]
Combine = Callable[[Values, Values], Values]


@dataclass(frozen=True, slots=True)
class Shift:
    """One round as one worker sees it: send to one worker while receiving from another.

    Attributes:
        destination: Who gets ``outgoing``.
        outgoing: What to send; nothing is sent when it is empty.
        source: Who sends.
        num_incoming: How many values come, of the same type; 0 when nothing does.
    """

    destination: int
    outgoing: Values
    source: int
    num_incoming: int


Rounds = Generator[Shift, Values, None]


def rounds_of_all_reduce(values: Values, rank: int, num_workers: int, combine: Combine) -> Rounds:
    """Reduce ``values`` over all workers, in place.

    A generator: it yields what is to be moved next, and wants to be sent what came in. A channel
    answers from the network; a simulation runs the generators of all workers in lockstep.

    Args:
        values: This worker's values ``[n]``; in the end, the combination of all workers'.
        rank: This worker.
        num_workers: W.
        combine: ``np.add``, ``np.maximum`` or another ufunc of two arguments.
    """
    blocks = _Blocks(values, num_workers)
    halvings = list(pairwise(_halved(num_workers)))
    for before, now in halvings:
        count = before - now
        outgoing = blocks.take(rank + now, count)
        mine = blocks.take(rank, count)
        incoming = yield _shift(rank, now, num_workers, outgoing, len(mine))
        with np.errstate(over="ignore", invalid="ignore"):
            blocks.put(rank, count, combine(mine, incoming))
    for before, now in reversed(halvings):
        count = before - now
        outgoing = blocks.take(rank, count)
        num_incoming = blocks.size(rank + now, count)
        incoming = yield _shift(rank, -now, num_workers, outgoing, num_incoming)
        blocks.put(rank + now, count, incoming)


def run(rounds: Rounds, move: Callable[[Shift], Values]) -> None:
    """Run all rounds.

    Args:
        rounds: What :func:`rounds_of_all_reduce` returned.
        move: Sends and receives; returns what came in, empty when nothing was to come.
    """
    try:
        shift = next(rounds)
        while True:
            shift = rounds.send(move(shift))
    except StopIteration:
        return


def _shift(rank: int, distance: int, num_workers: int, outgoing: Values, incoming: int) -> Shift:
    destination, source = (rank + distance) % num_workers, (rank - distance) % num_workers
    return Shift(destination, outgoing, source, incoming)


def _halved(number: int) -> list[int]:
    """Return the number, its half rounded up, and so on down to 1."""
    halves = [number]
    while halves[-1] > 1:
        halves.append(-(-halves[-1] // 2))
    return halves


class _Blocks:
    """An array seen as W blocks in a circle, as even as can be; some are empty when it is short."""

    def __init__(self, values: Values, num_workers: int) -> None:
        self._values = values
        self._bounds = [block * len(values) // num_workers for block in range(num_workers + 1)]

    def take(self, first: int, count: int) -> Values:
        """Return a copy of some blocks, counted from ``first`` around the circle."""
        return np.concatenate([self._values[part] for part in self._parts(first, count)])

    def put(self, first: int, count: int, values: Values) -> None:
        """Write some blocks."""
        position = 0
        for part in self._parts(first, count):
            size = part.stop - part.start
            self._values[part] = values[position : position + size]
            position += size

    def size(self, first: int, count: int) -> int:
        """Return how many values these blocks hold."""
        return sum(part.stop - part.start for part in self._parts(first, count))

    def _parts(self, first: int, count: int) -> tuple[slice, ...]:
        num_blocks = len(self._bounds) - 1
        first %= num_blocks
        last = first + count
        if last <= num_blocks:
            return (slice(self._bounds[first], self._bounds[last]),)
        end = slice(self._bounds[first], self._bounds[-1])
        return end, slice(0, self._bounds[last - num_blocks])

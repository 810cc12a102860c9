"""Simulated jobs in one process: dozens of workers as threads, thousands in lockstep."""

import queue
import threading

import numpy as np

from rankscope.exchange.allreduce import Combine, Rounds, Shift, Values, rounds_of_all_reduce
from rankscope.exchange.channel import Bytes, ChannelError, CountingChannel, Hello, Traffic


class _Hub:
    """What the channels of one simulated job share."""

    def __init__(self, num_workers: int, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.barrier = threading.Barrier(num_workers, timeout=timeout_seconds)
        self.slots: list[object] = [None] * num_workers
        self._mail: dict[tuple[int, int], queue.SimpleQueue[Values]] = {}

    def mail(self, source: int, destination: int) -> "queue.SimpleQueue[Values]":
        """Return what one worker sends to another, in order."""
        return self._mail.setdefault((source, destination), queue.SimpleQueue())


class MemoryChannel(CountingChannel):
    """A :class:`~rankscope.exchange.channel.Channel` whose workers are threads.

    It counts the bytes that a :class:`~rankscope.exchange.channel.GlooChannel` would move, and
    sums in the same order.
    """

    def __init__(self, hub: _Hub, rank: int, num_workers: int) -> None:
        super().__init__(rank, num_workers)
        self._hub = hub

    @classmethod
    def connect(cls, num_workers: int, timeout_seconds: float = 60.0) -> "list[MemoryChannel]":
        """Return one channel per worker of a simulated job."""
        hub = _Hub(num_workers, timeout_seconds)
        return [cls(hub, rank, num_workers) for rank in range(num_workers)]

    def gather_hellos(self, hello: Hello) -> list[Hello]:
        """Gather one greeting per worker, in rank order."""
        return [item for item in self._exchange(hello) if isinstance(item, Hello)]

    def gather(self, message: Bytes) -> Bytes:
        """Gather one message ``[n]`` per worker into ``[W, n]``; blocks.

        Raises:
            ChannelError: A peer is gone, did not answer in time, or sent another size.
        """
        self._count_gather(message)
        messages = [item for item in self._exchange(message) if isinstance(item, np.ndarray)]
        if len({len(item) for item in messages}) != 1:
            raise ChannelError(
                f"expected messages of one size, got {[len(item) for item in messages]} bytes"
            )
        return np.stack(messages)

    def gather_to_root(self, message: Bytes) -> Bytes | None:
        """Gather one message ``[n]`` per worker into ``[W, n]`` on rank 0, None elsewhere; blocks.

        Raises:
            ChannelError: A peer is gone, did not answer in time, or sent another size.
        """
        self._count_gather_to_root(message)
        if self._rank > 0:
            self._hub.mail(self._rank, 0).put(message)
            return None
        others = [self._receive(rank, len(message)) for rank in range(1, self._num_workers)]
        return np.stack([message, *others])

    def meet(self) -> None:
        """Do nothing: what a worker waits for here can be left anyway."""

    def close(self) -> None:
        """Do nothing: there is nothing to free."""

    def abandon(self) -> None:
        """Do nothing: a thread that waits here waits in Python."""

    def _exchange(self, item: object) -> list[object]:
        hub = self._hub
        hub.slots[self._rank] = item
        try:
            hub.barrier.wait()
            items = list(hub.slots)
            hub.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise ChannelError("a simulated worker did not answer in time") from error
        return items

    def _move(self, shift: Shift) -> Values:
        if shift.outgoing.size:
            self._hub.mail(self._rank, shift.destination).put(shift.outgoing)
        if not shift.num_incoming:
            return shift.outgoing[:0]
        return self._receive(shift.source, shift.num_incoming)

    def _receive(self, source: int, length: int) -> Values:
        hub = self._hub
        try:
            incoming = hub.mail(source, self._rank).get(timeout=hub.timeout_seconds)
        except queue.Empty as error:
            raise ChannelError(f"simulated worker {source} did not answer in time") from error
        if len(incoming) != length:
            raise ChannelError(f"expected {length} values of worker {source}, got {len(incoming)}")
        return incoming


def all_reduce_in_lockstep(values_WN: Values, combine: Combine) -> tuple[list[Traffic], int]:
    """Reduce the rows of a matrix in place, as W workers would, all in this thread.

    Args:
        values_WN: One row per worker; in the end, all rows are the combination of all.
        combine: A ufunc of two arguments, say ``np.add``.

    Returns:
        What each worker moves, and how many rounds follow each other.
    """
    num_workers = len(values_WN)
    rounds = [
        rounds_of_all_reduce(row, rank, num_workers, combine) for rank, row in enumerate(values_WN)
    ]
    traffic, num_rounds = [Traffic()] * num_workers, 0
    shifts = [next(worker, None) for worker in rounds]
    while all(shifts):
        moves = [shift for shift in shifts if shift]
        incoming = [moves[shift.source].outgoing for shift in moves]
        traffic = [
            before + Traffic(shift.outgoing.nbytes, values.nbytes)
            for before, shift, values in zip(traffic, moves, incoming, strict=True)
        ]
        shifts = [_answer(*pair) for pair in zip(rounds, incoming, strict=True)]
        num_rounds += 1
    return traffic, num_rounds


def _answer(rounds: Rounds, incoming: Values) -> Shift | None:
    try:
        return rounds.send(incoming)
    except StopIteration:
        return None

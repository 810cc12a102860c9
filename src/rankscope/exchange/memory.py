"""A channel between threads of one process, for tests and for simulating many workers."""

import threading

import numpy as np

from rankscope.exchange.channel import Bytes, ChannelError, Hello


class _Hub:
    """What the channels of one simulated job share."""

    def __init__(self, num_workers: int, timeout_seconds: float) -> None:
        self.num_workers = num_workers
        self.barrier = threading.Barrier(num_workers, timeout=timeout_seconds)
        self.slots: list[object] = [None] * num_workers


class MemoryChannel:
    """A :class:`~rankscope.exchange.channel.Channel` whose workers are threads."""

    def __init__(self, hub: _Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank

    @classmethod
    def connect(cls, num_workers: int, timeout_seconds: float = 60.0) -> "list[MemoryChannel]":
        """Return one channel per worker of a simulated job."""
        hub = _Hub(num_workers, timeout_seconds)
        return [cls(hub, rank) for rank in range(num_workers)]

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._rank

    @property
    def num_workers(self) -> int:
        """W, the number of workers."""
        return self._hub.num_workers

    def gather_hellos(self, hello: Hello) -> list[Hello]:
        """Gather one greeting per worker, in rank order."""
        return [item for item in self._exchange(hello) if isinstance(item, Hello)]

    def gather(self, message: Bytes) -> Bytes:
        """Gather one message ``[n]`` per worker into ``[W, n]``; blocks.

        Raises:
            ChannelError: A peer is gone, did not answer in time, or sent another size.
        """
        messages = [item for item in self._exchange(message) if isinstance(item, np.ndarray)]
        if len({len(item) for item in messages}) != 1:
            raise ChannelError(
                f"expected messages of one size, got {[len(item) for item in messages]} bytes"
            )
        return np.stack(messages)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""

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

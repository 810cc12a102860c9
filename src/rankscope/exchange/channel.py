"""The side channel: a process group of its own, on the CPU, used by one background thread.

Training never waits for it. Its group is gloo whatever the training uses, since a second NCCL
group can deadlock with the first; its collectives run in a thread of their own, one at a time and
in step order on every worker.

What a step costs on the wire, for W workers and n bytes from each (:class:`Traffic` counts it):

==================  =======================  =======================  ================
operation           sent                     received                 messages in turn
==================  =======================  =======================  ================
``gather``          (W−1)n                   (W−1)n                   W−1, in a ring
``gather_to_root``  n; rank 0: nothing       nothing; rank 0: (W−1)n  1
``reduce_…``        2(1 − 1/W)n              2(1 − 1/W)n              2·⌈log2 W⌉
``broadcast``       2(1 − 1/W)n              2(1 − 1/W)n              2·⌈log2 W⌉
``meet``            nothing                  nothing                  ⌈log2 W⌉
==================  =======================  =======================  ================

gloo adds 96 bytes to each message (its header, and one that announces it); with those of TCP and
IP about 320 were measured on the loopback interface, acknowledgements included.
"""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rankscope.errors import RankscopeError
from rankscope.exchange.allreduce import Combine, Shift, Values, rounds_of_all_reduce, run

Bytes = NDArray[np.uint8]

_LOOK = timedelta(seconds=0.5)
"""How long a thread waits inside of gloo at a time; each look costs 0.2 ms."""


class ChannelError(RankscopeError):
    """The channel is dead: a peer is gone, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a worker tells the others once, before the first step.

    Attributes:
        agreement: What must be equal on all workers: schema, options.
        facts: What is worth recording of this worker: host, device, versions.
        problem: Why this worker cannot start; empty when it can.
        kind: Name of the class of error that the problem is.
    """

    agreement: dict[str, Any]
    facts: dict[str, Any]
    problem: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one worker moved: the data alone, without headers and greetings.

    Attributes:
        sent: Bytes sent.
        received: Bytes received.
    """

    sent: int = 0
    received: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.sent + other.sent, self.received + other.received)

    @property
    def total(self) -> int:
        """Bytes sent plus received."""
        return self.sent + self.received


class Channel(Protocol):
    """W workers that exchange small messages, all of them at the same time and in one order."""

    @property
    def rank(self) -> int:
        """This worker's rank, from 0."""

    @property
    def num_workers(self) -> int:
        """W, the number of workers."""

    @property
    def traffic(self) -> Traffic:
        """What this worker has moved so far."""

    def gather_hellos(self, hello: Hello) -> list[Hello]:
        """Gather one greeting per worker, in rank order."""

    def gather(self, message: Bytes) -> Bytes:
        """Gather one message ``[n]`` per worker into ``[W, n]``; blocks.

        Raises:
            ChannelError: A peer is gone, or did not answer in time.
        """

    def gather_to_root(self, message: Bytes) -> Bytes | None:
        """Gather one message ``[n]`` per worker into ``[W, n]`` on rank 0, None elsewhere; blocks.

        Raises:
            ChannelError: A peer is gone, or did not answer in time.
        """

    def meet(self) -> None:
        """Wait until all workers are here, before a reduction after which none may wait; blocks.

        Raises:
            ChannelError: A peer is gone, or did not answer in time.
        """

    def reduce_sum(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the sum over workers ``[n]``, with the same bits on all of them; blocks.

        Raises:
            ChannelError: A peer is gone, or did not answer in time.
        """

    def reduce_max(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the maximum over workers ``[n]``; blocks.

        Raises:
            ChannelError: A peer is gone, or did not answer in time.
        """

    def broadcast(self, message: Bytes, root: int = 0) -> Bytes:
        """Return the root's message ``[n]``; the others give one of that size; blocks.

        Raises:
            ChannelError: A peer is gone, or did not answer in time.
        """

    def close(self) -> None:
        """Free the channel; for the thread that made it, when no gather is under way."""

    def abandon(self) -> None:
        """Leave what is waited for where it is, since the process ends; returns soon."""


class CountingChannel(ABC):
    """What channels have in common: who takes part, reductions, and the count of bytes.

    Args:
        rank: This worker's rank.
        num_workers: W.
    """

    def __init__(self, rank: int, num_workers: int) -> None:
        self._rank = rank
        self._num_workers = num_workers
        self._traffic = Traffic()

    @property
    def rank(self) -> int:
        """This worker's rank in the data-parallel group."""
        return self._rank

    @property
    def num_workers(self) -> int:
        """W, the size of the data-parallel group."""
        return self._num_workers

    @property
    def traffic(self) -> Traffic:
        """What this worker has moved so far."""
        return self._traffic

    def reduce_sum(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the sum over workers ``[n]``, with the same bits on all of them; blocks.

        Raises:
            ChannelError: A peer is gone, or did not answer in time.
        """
        return self._reduce(values, np.add)

    def reduce_max(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the maximum over workers ``[n]``; blocks.

        Raises:
            ChannelError: A peer is gone, or did not answer in time.
        """
        return self._reduce(values, np.maximum)

    def broadcast(self, message: Bytes, root: int = 0) -> Bytes:
        """Return the root's message ``[n]``; the others give one of that size; blocks.

        Raises:
            ChannelError: A peer is gone, or did not answer in time.
        """
        return self._reduce(message if self._rank == root else np.zeros_like(message), np.maximum)

    def _reduce(self, values: Values, combine: Combine) -> Values:
        total = values.copy()
        run(rounds_of_all_reduce(total, self._rank, self._num_workers, combine), self._count_move)
        return total

    def _count_move(self, shift: Shift) -> Values:
        incoming = self._move(shift)
        self._traffic += Traffic(shift.outgoing.nbytes, incoming.nbytes)
        return incoming

    def _count_gather(self, message: Bytes) -> None:
        others = (self._num_workers - 1) * message.nbytes
        self._traffic += Traffic(others, others)

    def _count_gather_to_root(self, message: Bytes) -> None:
        others = (self._num_workers - 1) * message.nbytes
        self._traffic += Traffic(0, others) if self._rank == 0 else Traffic(message.nbytes, 0)

    @abstractmethod
    def _move(self, shift: Shift) -> Values:
        """Send and receive at the same time; return what came in."""


class GlooChannel(CountingChannel):
    """A :class:`Channel` over a gloo group that shadows the training's data-parallel group.

    Every member of ``group`` must construct it at the same point of the program.

    Args:
        group: The data-parallel group; None for the default group.
        timeout_seconds: How long a gather waits for the slowest worker.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, timeout_seconds: float = 1800.0
    ) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._group: dist.ProcessGroup | None = dist.new_group(
            ranks,
            backend="gloo",
            timeout=timedelta(seconds=timeout_seconds),
            use_local_synchronization=len(ranks) != dist.get_world_size(),
            group_desc="rankscope",
        )
        super().__init__(dist.get_group_rank(self._group, dist.get_rank()), len(ranks))
        self._abandoned = False
        self._waiting = threading.Lock()  # held while a thread waits inside of gloo

    def gather_hellos(self, hello: Hello) -> list[Hello]:
        """Gather one greeting per worker, in rank order."""
        gathered: list[Any] = [None] * self._num_workers
        dist.all_gather_object(gathered, asdict(hello), group=self._group)
        return [Hello(**fields) for fields in gathered]

    def gather(self, message: Bytes) -> Bytes:
        """Gather one message ``[n]`` per worker into ``[W, n]``; blocks.

        Raises:
            ChannelError: A peer is gone, or did not answer in time.
        """
        gathered = np.empty((self._num_workers, len(message)), np.uint8)
        with self._live_group() as group:
            rows = list(torch.from_numpy(gathered))
            work = dist.all_gather(rows, torch.from_numpy(message), group=group, async_op=True)
            self._wait(work)
        self._count_gather(message)
        return gathered

    def gather_to_root(self, message: Bytes) -> Bytes | None:
        """Gather one message ``[n]`` per worker into ``[W, n]`` on rank 0, None elsewhere; blocks.

        Raises:
            ChannelError: A peer is gone, or did not answer in time.
        """
        root = self._rank == 0
        gathered = np.empty((self._num_workers, len(message)), np.uint8) if root else None
        with self._live_group() as group:
            rows = None if gathered is None else list(torch.from_numpy(gathered))
            own = torch.from_numpy(message)
            self._wait(dist.gather(own, rows, group=group, group_dst=0, async_op=True))
        self._count_gather_to_root(message)
        return gathered

    def meet(self) -> None:
        """Wait until all workers are here, before a reduction after which none may wait; blocks.

        The rounds of a reduction are receives from one peer. gloo cannot leave such a receive
        without closing the connections of the whole group, while a barrier can be left.

        Raises:
            ChannelError: A peer is gone, or did not answer in time.
        """
        options = dist.BarrierOptions()
        options.asyncOp = True
        options.device = torch.device("cpu")
        with self._live_group() as group:
            self._wait(group.barrier(options))

    def close(self) -> None:
        """Free the group and wait for its worker threads; not a collective.

        Such a thread drops the tensors of the last gather a moment after that has returned, and
        needs Python's lock for it. When the interpreter is already ending, asking for the lock
        aborts the process. So the threads must be gone before a script ends.
        """
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(Exception):  # the training may have destroyed it already
                dist.destroy_process_group(group)

    def abandon(self) -> None:
        """Leave what is waited for where it is, since the process ends; returns soon.

        A thread that comes back from gloo while Python shuts down aborts the process. So it is
        stopped between two looks, and stays stopped, with all memory that gloo may still use.
        """
        self._abandoned = True
        self._waiting.acquire(timeout=2 * _LOOK.total_seconds())

    def _wait(self, work: dist.Work | None) -> None:
        """Wait for a collective, as long as the process does not end."""
        if work is None:
            return
        while True:
            with self._inside():
                try:
                    work.wait(_LOOK)
                except RuntimeError:
                    if work.is_completed():  # then it failed, or has come since
                        work.wait()
                        return
                else:
                    return

    def _move(self, shift: Shift) -> Values:
        incoming = np.empty(shift.num_incoming, shift.outgoing.dtype)
        with self._live_group() as group, self._inside():
            works = []
            if incoming.size:
                target = torch.from_numpy(incoming)
                works.append(dist.irecv(target, group=group, group_src=shift.source))
            if shift.outgoing.size:
                message = torch.from_numpy(shift.outgoing)
                works.append(dist.isend(message, group=group, group_dst=shift.destination))
            for work in works:
                if work is not None:
                    work.wait()
        return incoming

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Be inside of gloo, or stop here for good when the process ends."""
        if self._abandoned:  # the lock alone is not fair: this thread would get it again
            threading.Event().wait()
        with self._waiting:
            yield

    @contextlib.contextmanager
    def _live_group(self) -> Iterator[dist.ProcessGroup]:
        """Yield the group; a failure of it becomes a :class:`ChannelError`."""
        if self._group is None:  # torch would take the training's default group instead
            raise ChannelError("the side channel is closed")
        try:
            yield self._group
        except (RuntimeError, ValueError) as error:
            raise ChannelError(
                f"the side channel to the other workers broke; one may have ended: {error}"
            ) from error

"""The side channel: a process group of its own, on the CPU, used by one background thread.

Training never waits for it. Its group is gloo whatever the training uses, since a second NCCL
group can deadlock with the first; its collectives run in a thread of their own, one at a time and
in step order on every worker.
"""

import contextlib
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rankscope.errors import RankscopeError

Bytes = NDArray[np.uint8]


class ChannelError(RankscopeError):
    """The channel is dead: a peer is gone, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a worker tells the others once, before the first step.

    Attributes:
        agreement: What must be equal on all workers: schema, options.
        facts: What is worth recording of this worker: host, device, versions.
        problem: Why this worker cannot start; empty when it can.
    """

    agreement: dict[str, Any]
    facts: dict[str, Any]
    problem: str = ""


class Channel(Protocol):
    """W workers that can gather messages of one size from each other."""

    @property
    def rank(self) -> int:
        """This worker's rank, from 0."""

    @property
    def num_workers(self) -> int:
        """W, the number of workers."""

    def gather_hellos(self, hello: Hello) -> list[Hello]:
        """Gather one greeting per worker, in rank order."""

    def gather(self, message: Bytes) -> Bytes:
        """Gather one message ``[n]`` per worker into ``[W, n]``; blocks.

        Raises:
            ChannelError: A peer is gone, or did not answer in time.
        """

    def close(self) -> None:
        """Free the channel; for the thread that made it, when no gather is under way."""


class GlooChannel:
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
        self._rank = dist.get_group_rank(self._group, dist.get_rank())
        self._num_workers = len(ranks)

    @property
    def rank(self) -> int:
        """This worker's rank in the data-parallel group."""
        return self._rank

    @property
    def num_workers(self) -> int:
        """W, the size of the data-parallel group."""
        return self._num_workers

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
        gathered = torch.empty(self._num_workers, len(message), dtype=torch.uint8)
        try:
            dist.all_gather(list(gathered), torch.from_numpy(message), group=self._group)
        except (RuntimeError, ValueError) as error:
            raise ChannelError(f"the side channel failed: {error}") from error
        array: Bytes = gathered.numpy()
        return array

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

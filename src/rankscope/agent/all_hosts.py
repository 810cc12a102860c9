"""The processes of all ranks of a job, seen from the root."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rankscope.agent.hang_report import CodePlace, ProcessState, Stack
from rankscope.agent.local_ranks import LocalRanks

if TYPE_CHECKING:
    from rankscope.agent.remote_hosts import RemoteHosts


class AllHosts:
    """The processes of all ranks, on this host and on others (``remote``; None without any)."""

    def __init__(self, local: LocalRanks, remote: "RemoteHosts | None") -> None:
        self._local = local
        self._remote = remote
        self.endings: dict[int, str] = {}

    def request_states(self) -> None:
        """Request the states of processes on other hosts."""
        if self._remote is not None:
            self._remote.request_states()

    def states(self) -> Mapping[int, ProcessState]:
        """Return the known states of processes, by rank."""
        others = {} if self._remote is None else self._remote.states
        return {**others, **self._local.states()}

    def marks(self) -> Mapping[int, CodePlace]:
        """Return the known places of ranks inside their steps."""
        others = {} if self._remote is None else self._remote.places
        return {**others, **self._local.marks()}

    def ending(self, rank: int) -> str:
        """Return how a rank ended whose connection was lost, as far as known."""
        return self.endings.get(rank) or self._local.ending(rank)

    def write_line(self, line: str) -> None:
        """Write a line to the error stream of the training, even while it hangs."""
        self._local.write_line(line)

    def take_stacks(self) -> None:
        """Start taking stacks on all hosts."""
        self._local.take_stacks()
        if self._remote is not None:
            self._remote.take_stacks()

    def stacks(self) -> Mapping[int, Stack] | None:
        """Return stacks by rank, once some have arrived."""
        own = self._local.stacks() or {}
        others = {} if self._remote is None else self._remote.stacks()
        return {**others, **own} or None

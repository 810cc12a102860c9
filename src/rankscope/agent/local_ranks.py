"""The processes of a host's ranks, seen from its agent."""

import contextlib
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankscope.agent.flight_recorder import Reader
from rankscope.agent.hang_report import CodePlace, ProcessState, Stack
from rankscope.agent.processes import ProcessWatch
from rankscope.agent.progress import open_mark, read_mark
from rankscope.agent.stacks import StackTaker
from rankscope.bus.words import printable

_log = logging.getLogger("rankscope")


@dataclass(slots=True)
class _Rank:
    watch: ProcessWatch
    mark: int | None
    thread: int
    collectives: Reader | None


class LocalRanks:
    """States, places and stacks of the ranks that have connected to this agent."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._taker: StackTaker | None = None

    def introduce(self, rank: int, hello: Mapping[str, Any], connection: socket.socket) -> None:
        """Add the process at the other end of a connection."""
        try:
            watch = ProcessWatch.of_peer(connection)
        except OSError:  # the system cannot identify it
            return
        self._forget(rank)
        mark = open_mark(watch.pid, int(hello["progress"])) if "progress" in hello else None
        reader = None
        if "collectives" in hello:
            with contextlib.suppress(OSError):
                reader = Reader(watch.pid, hello["collectives"])
        self._ranks[rank] = _Rank(watch, mark, int(hello.get("thread", 0)), reader)

    def lives(self, rank: int) -> bool | None:
        """Return whether a rank's process runs; None if unknown."""
        known = self._ranks.get(rank)
        if known is None or known.watch.pid == os.getpid():
            return None
        state = known.watch.state()
        return None if state is ProcessState.UNKNOWN else state is not ProcessState.ENDED

    def ending(self, rank: int) -> str:
        """Return how a rank ended whose connection was lost, as far as known."""
        known = self._ranks.get(rank)
        if known is None or self.lives(rank) is None:
            return "its connection ended"
        if self.lives(rank):
            return "its connection was lost, though its process lives"
        how = known.watch.ending()
        return f"its process ended ({how})" if how else "its process ended"

    def states(self) -> dict[int, ProcessState]:
        """Return the states of processes, by rank."""
        return {rank: known.watch.state() for rank, known in dict(self._ranks).items()}

    def marks(self) -> dict[int, CodePlace]:
        """Return the known places of ranks inside their steps."""
        places = {}
        for rank, known in dict(self._ranks).items():
            place = None if known.mark is None else read_mark(known.mark)
            if place is not None:
                places[rank] = place
        return places

    def request_states(self) -> None:
        """Do nothing: states on this host need no request."""

    def write_line(self, line: str) -> None:
        """Write a line to the error stream of the lowest rank, even while it hangs."""
        for rank in sorted(dict(self._ranks)):
            pid = self._ranks[rank].watch.pid
            if pid == os.getpid():
                _log.warning("%s", line)
                return
            with contextlib.suppress(OSError):
                flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
                descriptor = os.open(f"/proc/{pid}/fd/2", flags)
                try:
                    os.write(descriptor, f"rankscope: {printable(line)}\n".encode())
                finally:
                    os.close(descriptor)
                return

    def take_stacks(self) -> None:
        """Start taking the Python stacks and collectives of all live ranks."""
        if self._taker is None:
            ranks = dict(self._ranks).values()
            alive = [one for one in ranks if one.watch.state() is not ProcessState.ENDED]
            self._taker = StackTaker(
                {known.watch.pid: known.thread for known in alive},
                {known.watch.pid: known.collectives for known in alive if known.collectives},
            )

    def stacks(self) -> dict[int, Stack] | None:
        """Return the stacks by rank, once they are there."""
        taken = None if self._taker is None else self._taker.result()
        if taken is None:
            return None
        self._taker = None
        ranks = {known.watch.pid: rank for rank, known in dict(self._ranks).items()}
        return {ranks[pid]: stack for pid, stack in taken.items() if pid in ranks}

    def close(self) -> None:
        """Close all descriptors."""
        for rank in list(self._ranks):
            self._forget(rank)

    def _forget(self, rank: int) -> None:
        known = self._ranks.pop(rank, None)
        if known is not None:
            known.watch.close()
            if known.mark is not None:
                os.close(known.mark)
            if known.collectives is not None:
                known.collectives.close()

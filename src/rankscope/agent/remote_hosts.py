"""Other hosts, seen from the root: frames and processes of their ranks."""

import json
import time
from collections.abc import Mapping

from rankscope.agent.frames import ALL_RANKS, FrameKind, FrameReader, pack
from rankscope.agent.hang_report import CodePlace, ProcessState, Stack
from rankscope.agent.hosts import RootLink
from rankscope.agent.server import Arrived

SILENT_SECONDS = 10.0
"""After this long without a frame, a host counts as out of reach."""

GIVE_UP_SECONDS = 120.0
"""How long a host may be out of reach before its ranks count as ended."""

GIVE_UP_SECONDS_AT_END = 30.0
"""The same once the ranks of all other hosts have closed their scopes."""


class RemoteHosts:
    """The other hosts of a job; arguments as in :class:`~rankscope.agent.hosts.RootLink`."""

    def __init__(self, address: str | None, master: str | None) -> None:
        self._link = RootLink(address, master=master)
        self._host_of: dict[int, int] = {}
        self._gone: set[int] = set()
        self._silent: set[int] = set()
        self.states: dict[int, ProcessState] = {}
        self.places: dict[int, CodePlace] = {}
        self._stacks: dict[int, Stack] = {}

    @property
    def invitation(self) -> bytes:
        """The bytes with which another host's agent can connect; secret."""
        return self._link.invitation.encode()

    def poll(self) -> list[Arrived]:
        """Return new frames from ranks on other hosts."""
        now = time.time()
        arrived = []
        frames = self._link.poll()
        for host in self._link.take_behind():
            self._link.send(host, pack(FrameKind.INTRODUCE))
        for host, content in frames:
            for frame in FrameReader().feed(content):
                if frame.kind == FrameKind.STATES:
                    self._learn(json.loads(frame.payload))
                    continue
                if frame.kind == FrameKind.HELLO:
                    self._host_of[frame.rank] = host
                arrived.append(Arrived(frame.rank, frame, now))
        return arrived

    def newly_silent(self) -> list[list[int]]:
        """Return the ranks of each host that has just gone out of reach."""
        silent = {h for h in self._link.hosts if self._link.silent_seconds(h) > SILENT_SECONDS}
        news = sorted(silent - self._silent)
        self._silent = silent
        return [self._ranks_of(host) for host in news]

    def given_up(self, *, at_end: bool) -> list[int]:
        """Return, once, each rank whose host has been out of reach for too long."""
        limit = GIVE_UP_SECONDS_AT_END if at_end else GIVE_UP_SECONDS
        ranks: list[int] = []
        for host in self._link.hosts:
            if host not in self._gone and self._link.silent_seconds(host) > limit:
                self._gone.add(host)
                ranks += self._ranks_of(host)
        return ranks

    def send(self, rank: int, content: bytes) -> None:
        """Send a frame to the host of a rank, or to all hosts."""
        if rank == ALL_RANKS:
            for host in self._link.hosts:
                self._link.send(host, content)
        elif rank in self._host_of:
            self._link.send(self._host_of[rank], content)

    def take_stacks(self) -> dict[int, Stack]:
        """Return stacks that have arrived since the last call."""
        come = self._stacks
        self._stacks = {}
        return come

    def close(self, seconds: float) -> None:
        """Send the remaining frames and close the links."""
        self._link.close(seconds)

    def _ranks_of(self, host: int) -> list[int]:
        return [rank for rank, each in self._host_of.items() if each == host]

    def _learn(self, report: Mapping[str, Mapping[str, object]]) -> None:
        for rank, state in report.get("states", {}).items():
            self.states[int(rank)] = ProcessState(str(state))
        for rank, place in report.get("places", {}).items():
            self.places[int(rank)] = CodePlace(*place)  # type: ignore[misc]
        self._stacks |= {int(r): s for r, s in report.get("stacks", {}).items()}  # type: ignore[misc]

"""The root's view of other hosts: their ranks' frames, and the processes that their agents see."""

import json
import time
from collections.abc import Mapping

from rankscope.agent.frames import ALL_RANKS, FrameKind, FrameReader, pack
from rankscope.agent.hang_report import CodePlace, ProcessState, Stack
from rankscope.agent.root_link import RootLink
from rankscope.agent.server import Arrived

SILENT_SECONDS = 10.0
"""After so long without a word from a host it is told that it is out of reach."""

GIVE_UP_SECONDS = 120.0
"""How long a host may be out of reach before its ranks count as gone."""

GIVE_UP_SECONDS_AT_END = 30.0
"""The same when the ranks of all other hosts have closed their scopes."""


class Branches:
    """The other hosts of a job.

    Args:
        address: Where to listen; all addresses of this host by default.
        master: Name or address of the training's store, which tells what to advertise.
    """

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
        """What another host's agent needs to come; secret."""
        return self._link.invitation.encode()

    def poll(self) -> list[Arrived]:
        """Return frames of ranks on other hosts."""
        now, arrived = time.time(), []
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
        """Return the ranks of each host that is out of reach, once each time that it is."""
        silent = {h for h in self._link.hosts if self._link.silent_seconds(h) > SILENT_SECONDS}
        news, self._silent = sorted(silent - self._silent), silent
        return [self._ranks_of(host) for host in news]

    def given_up(self, *, at_end: bool) -> list[int]:
        """Return ranks of hosts that have been out of reach for too long, each once."""
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

    def ask(self) -> None:
        """Have all hosts tell how their processes are."""
        self.send(ALL_RANKS, pack(FrameKind.LOOK))

    def take_stacks(self) -> None:
        """Have all hosts take stacks."""
        self.send(ALL_RANKS, pack(FrameKind.STACKS))

    def stacks(self) -> Mapping[int, Stack]:
        """Return stacks that have come since the last call."""
        come, self._stacks = self._stacks, {}
        return come

    def close(self, seconds: float) -> None:
        """Send what waits, and close the links."""
        self._link.close(seconds)

    def _ranks_of(self, host: int) -> list[int]:
        return [rank for rank, each in self._host_of.items() if each == host]

    def _learn(self, told: Mapping[str, Mapping[str, object]]) -> None:
        for rank, state in told.get("states", {}).items():
            self.states[int(rank)] = ProcessState(str(state))
        for rank, place in told.get("places", {}).items():
            self.places[int(rank)] = CodePlace(*place)  # type: ignore[misc]
        self._stacks |= {int(r): s for r, s in told.get("stacks", {}).items()}  # type: ignore[misc]

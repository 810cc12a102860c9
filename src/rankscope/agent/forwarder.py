"""What the agent of any other host does: it hands its ranks' frames on to the root, and back.

Beyond 64 workers a step goes up once all of its ranks have delivered it, narrowed and summed
(:mod:`rankscope.agent.summary`).
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from rankscope.agent.frames import ALL_RANKS, GUESTS, Frame, FrameKind, FrameReader, pack
from rankscope.agent.local_ranks import LocalRanks
from rankscope.agent.message import StepMessage
from rankscope.agent.summary import host_summary
from rankscope.bus.layout import Layout
from rankscope.bus.step import MAX_PAIRED_WORKERS

LINGER_SECONDS = 10.0
"""How long an agent tries to hand over what it has, once its ranks are gone."""

PATIENCE_SECONDS = 60.0
"""How long it waits for the root's last word, once its ranks have closed their scopes."""

TIGHT_BYTES = 16 << 20
"""With more than this waiting for the root, gradients are left out."""

_LASTING = {
    FrameKind.HELLO,
    FrameKind.SUBSCRIBE,
    FrameKind.BYE,
    FrameKind.GONE,
}  # the root must know these of a rank


class HostSteps:
    """Collects the messages of a host's ranks until a step is whole.

    Args:
        num_local: How many ranks the host has.
        layout: How to read their messages.
    """

    def __init__(self, num_local: int, layout: Layout) -> None:
        self._num_local, self._layout = num_local, layout
        self._steps: dict[int, dict[int, StepMessage]] = {}

    def add(self, rank: int, message: StepMessage) -> bytes | None:
        """Take a message; return the host's summary of the step that it completes."""
        step = self._steps.setdefault(message.step, {})
        step[rank] = message
        if len(step) < self._num_local:
            return None
        return host_summary(self._steps.pop(message.step), self._layout)


class Forwarder:
    """Stands between the ranks of a host and the root.

    Args:
        setup: What the rank that has started this agent has told: the host's number, how many
            ranks it has, and the layout of messages.
        send: Sends a frame to a local rank, or to all of them.
        ranks: The processes of this host's ranks.
    """

    def __init__(
        self, setup: Mapping[str, Any], send: Callable[[int, bytes], None], ranks: LocalRanks
    ) -> None:
        from rankscope.agent.host_link import HostLink  # ZeroMQ: only with several hosts

        self._num_local = int(setup["num_local"])
        layout = Layout.from_json(setup["layout"])
        self._steps = None
        if layout.num_workers > MAX_PAIRED_WORKERS:
            self._steps = HostSteps(self._num_local, layout)
        self._send_local, self._ranks = send, ranks
        self._link = HostLink(int(setup["host"]))
        self._standing: dict[tuple[int, FrameKind], bytes] = {}  # what is lasting of each rank
        self._left: set[int] = set()  # ranks that send nothing more, and
        self._gone: set[int] = set()  # those of them that also hear nothing more
        self._left_at = math.inf
        self._told: set[int] = set()
        self._stacks_wanted = False
        self.finished = False

    def take(self, rank: int, frame: Frame | None, at: float) -> None:
        """Take a frame of a local rank, or None for the end of its connection."""
        if rank >= GUESTS:
            if frame is not None and frame.kind == FrameKind.EVIDENCE:
                self._hand_on(FrameKind.EVIDENCE, frame.payload, rank, frame.step)
        elif frame is None:
            self._left.add(rank)
            self._gone.add(rank)
            why = json.dumps({"how": self._ranks.ending(rank), "time": at}).encode()
            self._hand_on(FrameKind.GONE, why, rank)
        elif frame.kind == FrameKind.INVITATION:
            self._link.open(frame.payload)
        elif frame.kind == FrameKind.HELLO:
            self._hand_on(FrameKind.HELLO, b"{}", rank)
        elif frame.kind == FrameKind.STEP:
            self._take_step(rank, frame)
        else:
            if frame.kind == FrameKind.BYE:
                self._left.add(rank)
            self._hand_on(FrameKind(frame.kind), frame.payload, rank, frame.step)

    def work(self) -> bool:
        """Exchange frames with the root; return whether there may be more of them."""
        frames = [frame for each in self._link.poll() for frame in FrameReader().feed(each)]
        for frame in frames:
            self._give_back(frame)
        return bool(frames)

    def idle(self) -> None:
        """Say what was asked for; end when all ranks of this host are gone."""
        if self._stacks_wanted:
            stacks = self._ranks.stacks()
            if stacks is not None:
                self._stacks_wanted = False
                told = {str(rank): stack for rank, stack in stacks.items()}
                self._hand_on(FrameKind.STATES, json.dumps({"stacks": told}).encode())
        if len(self._left) < self._num_local:
            return
        self._left_at = min(self._left_at, time.monotonic())
        waited = time.monotonic() - self._left_at
        if len(self._gone) == self._num_local or waited > PATIENCE_SECONDS:
            self._end()

    def fail(self, error: BaseException) -> None:
        """End after an error of the monitor's own; the training goes on."""
        why = f"{type(error).__name__}: {error}"
        self._send_local(ALL_RANKS, pack(FrameKind.OFF, why.encode()))
        self._end()

    def _take_step(self, rank: int, frame: Frame) -> None:
        tight = self._link.backlog_bytes > TIGHT_BYTES
        if self._steps is None and not tight:
            self._hand_on(FrameKind.STEP, frame.payload, rank, frame.step)
            return
        message = StepMessage.unpack(frame.payload)
        if tight:
            message.without_bulk()
        if self._steps is None:
            self._hand_on(FrameKind.STEP, message.pack(), rank, frame.step)
            return
        summary = self._steps.add(rank, message)
        if summary is not None:
            self._hand_on(FrameKind.SUMMARY, summary, step=frame.step)

    def _hand_on(
        self, kind: FrameKind, payload: bytes, rank: int = ALL_RANKS, step: int = -1
    ) -> None:
        content = pack(kind, payload, rank=rank, step=step)
        if kind in _LASTING:
            self._standing[rank, kind] = content
        self._link.send(content, lasting=kind in _LASTING)

    def _give_back(self, frame: Frame) -> None:
        if frame.kind == FrameKind.LOOK:
            self._ranks.ask()
            states = {str(rank): str(state) for rank, state in self._ranks.states().items()}
            places = {str(rank): list(place) for rank, place in self._ranks.marks().items()}
            told = {"states": states, "places": places}
            self._hand_on(FrameKind.STATES, json.dumps(told).encode())
        elif frame.kind == FrameKind.INTRODUCE:
            for content in self._standing.values():
                self._link.send(content, lasting=True)
        elif frame.kind == FrameKind.STACKS:
            self._ranks.take_stacks()
            self._stacks_wanted = True
        else:
            content = pack(FrameKind(frame.kind), frame.payload, rank=frame.rank, step=frame.step)
            self._send_local(frame.rank, content)
            if frame.kind == FrameKind.DONE:
                self._told.add(frame.rank)
                if len(self._told) == self._num_local:
                    self._end(0.0)  # the root wants nothing more

    def _end(self, linger_seconds: float = LINGER_SECONDS) -> None:
        self.finished = True
        self._link.close(linger_seconds)

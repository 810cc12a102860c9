"""The agent of any host but the root's: it forwards frames from its ranks to the root, and back.

Beyond 64 workers it waits until all of its ranks have delivered a step, then sends one summary
(:mod:`rankscope.agent.summary`).
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from rankscope.agent.frames import ALL_RANKS, GUESTS, Frame, FrameKind, FrameReader, pack
from rankscope.agent.message import StepMessage
from rankscope.agent.ranks import RankProcesses
from rankscope.agent.summary import HostSteps
from rankscope.bus.messages import Layout
from rankscope.bus.step import MAX_PAIRED_WORKERS

LINGER_SECONDS = 10.0
"""How long an agent tries to send its remaining frames once its ranks have ended."""

PATIENCE_SECONDS = 60.0
"""How long it waits for the root's last frame once its ranks have closed their scopes."""

TIGHT_BYTES = 16 << 20
"""With a longer queue to the root, gradients are left out."""

_LASTING = {FrameKind.HELLO, FrameKind.SUBSCRIBE, FrameKind.BYE, FrameKind.GONE}
"""Frames that the root must get, also after a broken link."""


class Forwarder:
    """Forwards frames between the ranks of a host and the root.

    ``setup`` comes in the hello frame of the rank that started this agent.
    """

    def __init__(
        self, setup: Mapping[str, Any], send: Callable[[int, bytes], None], ranks: RankProcesses
    ) -> None:
        from rankscope.agent.hosts import HostLink  # ZeroMQ: only with several hosts

        self._num_local = int(setup["num_local"])
        layout = Layout.from_json(setup["layout"])
        self._steps = None
        if layout.num_workers > MAX_PAIRED_WORKERS:
            self._steps = HostSteps(self._num_local, layout)
        self._send_local = send
        self._ranks = ranks
        self._link = HostLink(int(setup["host"]))
        self._standing: dict[tuple[int, FrameKind], bytes] = {}  # the lasting frames of each rank
        self._left: set[int] = set()  # ranks that send nothing more
        self._gone: set[int] = set()  # ranks whose connection has ended
        self._left_at = math.inf
        self._dismissed: set[int] = set()
        self._stacks_wanted = False
        self.finished = False

    def take(self, rank: int, frame: Frame | None, at: float) -> None:
        """Forward a frame of a local rank; None: its connection has ended."""
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
            self._handle_step(rank, frame)
        else:
            if frame.kind == FrameKind.BYE:
                self._left.add(rank)
            self._hand_on(FrameKind(frame.kind), frame.payload, rank, frame.step)

    def work(self) -> bool:
        """Exchange frames with the root; return whether more may be waiting."""
        frames = [frame for each in self._link.poll() for frame in FrameReader().feed(each)]
        for frame in frames:
            self._give_back(frame)
        return bool(frames)

    def idle(self) -> None:
        """Send requested stacks; end once all ranks of this host have ended."""
        if self._stacks_wanted:
            stacks = self._ranks.stacks()
            if stacks is not None:
                self._stacks_wanted = False
                by_rank = {str(rank): stack for rank, stack in stacks.items()}
                self._hand_on(FrameKind.STATES, json.dumps({"stacks": by_rank}).encode())
        if len(self._left) < self._num_local:
            return
        self._left_at = min(self._left_at, time.monotonic())
        waited = time.monotonic() - self._left_at
        if len(self._gone) == self._num_local or waited > PATIENCE_SECONDS:
            self._end()

    def fail(self, error: BaseException) -> None:
        """End after an error in the monitor; the training goes on."""
        why = f"{type(error).__name__}: {error}"
        self._send_local(ALL_RANKS, pack(FrameKind.OFF, why.encode()))
        self._end()

    def _handle_step(self, rank: int, frame: Frame) -> None:
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
            states = {str(rank): str(state) for rank, state in self._ranks.states().items()}
            places = {str(rank): list(place) for rank, place in self._ranks.marks().items()}
            content = json.dumps({"states": states, "places": places}).encode()
            self._hand_on(FrameKind.STATES, content)
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
                self._dismissed.add(frame.rank)
                if len(self._dismissed) == self._num_local:
                    self._end(0.0)  # the root has finished

    def _end(self, linger_seconds: float = LINGER_SECONDS) -> None:
        self.finished = True
        self._link.close(linger_seconds)

"""The agent of one host: its loop, in a process or in a thread."""

import contextlib
import hmac
import json
import logging
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rankscope.agent.frames import ALL_RANKS, GUESTS, Frame, FrameKind, FrameReader, pack
from rankscope.agent.host_summary import HostAssembly
from rankscope.agent.rank_processes import RankProcesses, lower_priority
from rankscope.agent.root import Root
from rankscope.agent.server import LocalServer
from rankscope.agent.step_message import StepMessage
from rankscope.bus.messages import Layout
from rankscope.bus.step import MAX_PAIRED_WORKERS
from rankscope.bus.words import make_printable, name_ranks, ranks_of_job
from rankscope.errors import RankscopeError

if TYPE_CHECKING:
    from rankscope.agent.hosts import RemoteHosts


LINGER_SECONDS = 10.0  # how long it tries to send its last frames once its ranks have ended

PATIENCE_SECONDS = 60.0  # how long it waits for the root's last frame once scopes are closed

TIGHT_BYTES = 16 << 20  # with a longer queue to the root, gradients are left out

_LASTING = {FrameKind.HELLO, FrameKind.SUBSCRIBE, FrameKind.BYE, FrameKind.GONE}
"""Frames that the root must get, also after a broken link."""


class Forwarder:
    """Forwards frames between the ranks of a host and the root, from any host but the root's.

    Beyond 64 workers it waits until all of its ranks have delivered a step, then sends one summary
    (:mod:`rankscope.agent.host_summary`).

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
            self._steps = HostAssembly(self._num_local, layout)
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
                self._send_to_root(FrameKind.EVIDENCE, frame.payload, rank, frame.step)
        elif frame is None:
            self._left.add(rank)
            self._gone.add(rank)
            why = json.dumps({"how": self._ranks.ending(rank), "time": at}).encode()
            self._send_to_root(FrameKind.GONE, why, rank)
        elif frame.kind == FrameKind.INVITATION:
            self._link.open(frame.payload)
        elif frame.kind == FrameKind.HELLO:
            self._send_to_root(FrameKind.HELLO, b"{}", rank)
        elif frame.kind == FrameKind.STEP:
            self._handle_step(rank, frame)
        else:
            if frame.kind == FrameKind.BYE:
                self._left.add(rank)
            self._send_to_root(FrameKind(frame.kind), frame.payload, rank, frame.step)

    def work(self) -> bool:
        """Exchange frames with the root; return whether more may be waiting."""
        frames = [frame for each in self._link.poll() for frame in FrameReader().feed(each)]
        for frame in frames:
            self._handle_from_root(frame)
        return bool(frames)

    def idle(self) -> None:
        """Send requested stacks; end once all ranks of this host have ended."""
        if self._stacks_wanted:
            stacks = self._ranks.stacks()
            if stacks is not None:
                self._stacks_wanted = False
                by_rank = {str(rank): stack for rank, stack in stacks.items()}
                self._send_to_root(FrameKind.STATES, json.dumps({"stacks": by_rank}).encode())
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
            self._send_to_root(FrameKind.STEP, frame.payload, rank, frame.step)
            return
        message = StepMessage.unpack(frame.payload)
        if tight:
            message.without_bulk()
        if self._steps is None:
            self._send_to_root(FrameKind.STEP, message.pack(), rank, frame.step)
            return
        summary = self._steps.add(rank, message)
        if summary is not None:
            self._send_to_root(FrameKind.SUMMARY, summary, step=frame.step)

    def _send_to_root(
        self, kind: FrameKind, payload: bytes, rank: int = ALL_RANKS, step: int = -1
    ) -> None:
        content = pack(kind, payload, rank=rank, step=step)
        if kind in _LASTING:
            self._standing[rank, kind] = content
        self._link.send(content, lasting=kind in _LASTING)

    def _handle_from_root(self, frame: Frame) -> None:
        if frame.kind == FrameKind.LOOK:
            states = {str(rank): str(state) for rank, state in self._ranks.states().items()}
            places = {str(rank): list(place) for rank, place in self._ranks.marks().items()}
            content = json.dumps({"states": states, "places": places}).encode()
            self._send_to_root(FrameKind.STATES, content)
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


_log = logging.getLogger("rankscope")

TOGETHER_SECONDS = 0.25  # how long steps may wait to be judged together with later ones

_LINKED_SECONDS = 0.02  # how long an agent waits for its ranks between messages of other hosts

ADDRESS = "RANKSCOPE_ADDRESS"  # environment variable: where other hosts reach the root's host

FIRST_SECONDS = 120.0  # how long an agent waits for the rank that started it
ORPHAN_SECONDS = 4.0  # the same once that rank's process, or all connected ranks have ended
CLOSE_SECONDS = 5.0  # how long it waits for training processes to read its last frames


class Agent:
    """Serves the ranks of one host until the run ends; ``parent`` started it, None in a thread."""

    def __init__(
        self,
        listening: socket.socket,
        secret: str,
        *,
        in_thread: bool = False,
        parent: int | None = None,
    ) -> None:
        self._in_thread = in_thread
        self._parent = parent
        self._secret = secret
        self._ranks = RankProcesses()
        self._server = LocalServer(
            listening, self._check, introduce=self._introduce, lives=self._ranks.lives
        )
        # a forwarder on other hosts than that of rank 0; None until a rank connects
        self.root: Root | Forwarder | None = None
        self._remote: RemoteHosts | None = None
        self._early: deque[tuple[int, Frame | None, float]] = deque()
        self._worked_at = self._alone_since = 0.0
        self._lines: deque[tuple[int, str, str]] = deque(maxlen=256)
        self._naming = contextlib.ExitStack()

    def run(self) -> None:
        """Serve until the run is closed, or all ranks have ended."""
        began = time.monotonic()
        self._server.start()
        if not self._in_thread:
            lower_priority()  # of this thread: the one that reads must keep up with the training
        try:
            while self.root is None or not self.root.finished:
                self._turn()
                if self.root is None and self._is_orphaned(time.monotonic() - began):
                    self._reject_ranks("the rank that has started the monitor's agent never came")
                    return
        except Exception as error:
            if self.root is not None:
                self.root.fail(error)
            raise
        finally:
            self._send_lines()
            self._server.close(CLOSE_SECONDS)
            if self._remote is not None:
                self._remote.close(CLOSE_SECONDS)
            self._ranks.close()
            self._naming.close()

    def log(self, level: int, line: str, trace: str = "") -> None:
        """Queue a line for the log of rank 0's training, perhaps with a traceback."""
        self._lines.append((level, line, trace))

    def _is_orphaned(self, seconds: float) -> bool:
        """Return whether no run will begin here: the rank that starts it has not connected."""
        orphan = self._parent is not None and os.getppid() != self._parent
        if not orphan and (self._server.ranks or not self._early):
            self._alone_since = seconds
        return seconds - self._alone_since > ORPHAN_SECONDS or seconds > FIRST_SECONDS

    def _reject_ranks(self, why: str) -> None:
        for rank in self._server.ranks:
            self._server.send(rank, pack(FrameKind.OFF, why.encode(), rank=rank))

    def _turn(self) -> None:
        alone = self._remote is None and not isinstance(self.root, Forwarder)
        turn = TOGETHER_SECONDS if alone else _LINKED_SECONDS
        for rank, frame, at in self._server.take(turn):
            self._take(rank, frame, at)
        root = self.root
        if root is None:
            return
        try:
            if self._remote is not None:
                self._receive_from_hosts()
            if isinstance(root, Root):
                root.arrived = self._server.newest
                if not self._is_time(root):
                    return
            while root.work() and not root.finished:
                self._send_lines()
            root.idle()
        except Exception as error:
            self._note_failure(error)
            root.fail(error)
        self._send_lines()

    def _is_time(self, root: Root) -> bool:
        """Return whether to judge steps now: short ones are cheaper together."""
        now = time.monotonic()
        if now - self._worked_at < TOGETHER_SECONDS and not root.should_flush:
            return False
        self._worked_at = now
        return True

    def _take(self, rank: int, frame: Frame | None, at: float) -> None:
        if frame is not None and frame.kind == FrameKind.HELLO and self.root is None:
            self._begin(json.loads(frame.payload))
        if self.root is None:
            self._early.append((rank, frame, at))
            return
        while self._early:
            self._pass_on(*self._early.popleft())
        self._pass_on(rank, frame, at)

    def _pass_on(self, rank: int, frame: Frame | None, at: float) -> None:
        assert self.root is not None
        if self.root.finished:
            return
        try:
            self.root.take(rank, frame, at)
        except Exception as error:
            self._note_failure(error)
            self.root.fail(error)

    def _begin(self, hello: dict[str, Any]) -> None:
        """Become the root or a forwarder, if a rank's hello frame holds the setup of one."""
        try:
            if "forward" in hello:
                self.root = Forwarder(hello["forward"], self._send, self._ranks)
            elif "root" in hello:
                self._begin_as_root(hello["root"])
        except Exception as error:
            self._note_failure(error)
            why = str(error) if isinstance(error, RankscopeError) else repr(error)
            if isinstance(error, MemoryError):
                why = "there is not enough memory for the monitor's agent"
            self._reject_ranks(why)
            raise

    def _begin_as_root(self, setup: dict[str, Any]) -> None:
        if setup["hosts"] > 1:
            from rankscope.agent.hosts import RemoteHosts

            self._remote = RemoteHosts(os.environ.get(ADDRESS), setup["master"])
            invitation = pack(FrameKind.INVITATION, self._remote.invitation, rank=0)
            self._server.send(0, invitation)
        self._ranks.remote = self._remote
        self._naming.enter_context(ranks_of_job(setup["info"]))
        self.root = Root(setup, self._send, self._ranks)

    def _receive_from_hosts(self) -> None:
        """Handle frames from other hosts; give up ranks that are out of reach too long."""
        assert self._remote is not None
        for rank, frame, at in self._remote.poll():
            if frame is not None and frame.kind == FrameKind.GONE:
                ending = json.loads(frame.payload)
                self._ranks.endings[rank] = ending["how"]
                self._pass_on(rank, None, ending["time"])
            else:
                self._pass_on(rank, frame, at)
        for ranks in self._remote.newly_silent():
            _log.warning(
                "the agent of %s is out of reach; the data of those ranks waits there, up to a "
                "limit, and follows once the agent is back",
                name_ranks(ranks),
            )
        assert isinstance(self.root, Root)
        for rank in self._remote.given_up(at_end=self.root.has_closed_here):
            self._ranks.endings[rank] = "its host is out of reach"
            self._pass_on(rank, None, time.time())

    def _send(self, rank: int, content: bytes) -> None:
        self._send_lines()  # lines go before a frame that ends the connection
        if self._remote is not None and (rank == ALL_RANKS or rank not in self._server.ranks):
            self._remote.send(rank, content)
        own = (each for each in self._server.ranks if each < GUESTS)
        for each in own if rank == ALL_RANKS else (rank,):
            self._server.send(each, content)

    def _send_lines(self) -> None:
        while self._lines:
            content = json.dumps(self._lines.popleft()).encode()
            self._server.send(0, pack(FrameKind.LOG, content, rank=0))

    def _note_failure(self, error: BaseException) -> None:
        self.log(logging.DEBUG, "the agent failed", "".join(traceback.format_exception(error)))

    def _check(self, frame: Frame) -> int | None:
        try:
            hello = json.loads(frame.payload)
            same = hmac.compare_digest(str(hello["secret"]), self._secret)
            return int(hello["rank"]) if same else None
        except (ValueError, KeyError, TypeError):
            return None

    def _introduce(self, rank: int, frame: Frame, connection: socket.socket) -> None:
        if rank >= GUESTS:
            return
        self._ranks.introduce(rank, json.loads(frame.payload), connection)
        if not self._in_thread:
            self._server.send(rank, pack(FrameKind.WELCOME, str(os.getpid()).encode(), rank=rank))


class LinesToTraining(logging.Handler):
    """Sends the agent's log to the training, whose handlers and levels apply."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(logging.INFO)
        self._agent = agent

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line."""
        self._agent.log(record.levelno, record.getMessage(), record.exc_text or "")


def serve(descriptor: int, secret: str, parent: int) -> None:
    """Run the agent of this host in this process, on a listening socket's descriptor."""
    agent = Agent(socket.socket(fileno=descriptor), secret, parent=parent)
    _log.setLevel(logging.INFO)
    _log.propagate = False
    _log.addFilter(make_printable)
    _log.addHandler(LinesToTraining(agent))
    own = logging.StreamHandler()  # also of what comes when no rank is left to log it
    own.setLevel(logging.WARNING)
    _log.addHandler(own)
    try:
        agent.run()
    finally:
        if isinstance(agent.root, Root):
            agent.root.linger()


def serve_in_thread(listening: socket.socket, secret: str) -> tuple[Agent, threading.Thread]:
    """Run the agent of this host in a thread of the training's process."""
    agent = Agent(listening, secret, in_thread=True)
    thread = threading.Thread(target=agent.run, name="rankscope-agent", daemon=True)
    thread.start()
    return agent, thread


def main() -> None:
    """Run ``python -m rankscope.agent``."""
    descriptor, parent = map(int, sys.argv[1:])
    serve(descriptor, sys.stdin.readline().strip(), parent)

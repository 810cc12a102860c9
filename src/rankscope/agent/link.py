"""The training's end of the socket to its agent, and the agent's start.

The first local rank binds the socket, and starts the process behind it. The socket listens before
the agent runs: connections and steps wait in the kernel. On Linux it is abstract: no directory must
be writable, no path can be too long, and no file is left behind. Any process in the network
namespace can open it; the agent rejects those without the run's secret.

No call of a :class:`Link` but ``drain`` and ``wait`` blocks.

When this process is killed, the kernel keeps sent bytes, and the agent reads them. Frames that do
not fit into the socket wait in memory, in order, up to a limit.

Ctrl-C may be raised between a system call and the update of the number of sent bytes. Then the
next call opens another connection and sends the frame again; the agent ignores a repeated step.
"""

import contextlib
import fcntl
import logging
import math
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.agent.frames import (
    QUIETLY,
    TELLS_UNREAD,
    Frame,
    FrameError,
    FrameKind,
    FrameReader,
    has_incoming,
    identity,
    pack,
    unread_bytes,
)
from rankscope.agent.hang_report import ProcessState
from rankscope.agent.rank_processes import ProcessWatch, busy_seconds_of, ending_of
from rankscope.bus.probe import Content
from rankscope.errors import RankscopeError

if TYPE_CHECKING:
    from rankscope.agent.process import Agent


ROOM_BYTES = 1 << 20  # with more bytes waiting, steps are sent without gradients
MOST_BYTES = 32 << 20  # with more bytes waiting, the agent counts as lost
SILENT_SECONDS = 300.0
"""The same after this long without progress, with frames waiting: a machine may have no time for it
for minutes. ``MOST_BYTES`` limits the memory meanwhile."""

_SEND_BUFFER = 4 << 20  # the kernel gives less where it must
_CHUNK = 1 << 16
_LOOK = 1 / 300  # share of that time between two looks at an agent that keeps up

Connect = Callable[[], socket.socket]


class LinkError(RankscopeError):
    """The agent is out of reach."""


class AgentEndedError(LinkError):
    """The agent has ended or stopped recording, for all ranks of its host."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one worker has sent to its agent and received from it."""

    sent: int = 0
    received: int = 0

    @property
    def total(self) -> int:
        """Bytes sent plus received."""
        return self.sent + self.received


class _Connection(Enum):
    """What is known of the connection.

    Each system call leads from OPEN to IN_CALL and back. Ctrl-C may leave it at IN_CALL: then the
    next call opens another connection. A call that fails leads to SHUT, or raises.
    """

    OPEN = auto()
    IN_CALL = auto()
    SHUT = auto()  # the agent takes no more, and has left frames that are unread


class Link:
    """Exchanges frames with the agent.

    The first call raises if the agent cannot be reached, not the constructor: by then the training
    has begun on all ranks, and goes on.

    ``hello`` is the first frame of every connection; ``wake`` continues a stopped agent, None on
    ranks that did not start it.
    """

    def __init__(
        self, connect: Connect, hello: bytes, wake: Callable[[], None] | None = None
    ) -> None:
        self._connect = connect
        self._hello = hello
        self._wake = wake
        self._broken: OSError | None = None  # since the beginning
        self._lock = threading.RLock()  # Ctrl-C may leave it held, as a block with it ends
        self._waiting: deque[memoryview] = deque()
        self._frame: bytes | None = None  # a part of it may have been sent
        self._bytes_waiting = 0
        self._left_unread: int | None = None  # after the last frame, if the agent lags behind
        self._progress = time.monotonic()
        self._looked = -math.inf
        self._sent = self._received = 0
        self._connection = _Connection.OPEN
        self._socket: socket.socket | None = None
        self._reader = FrameReader()
        self._chunk = memoryview(bytearray(_CHUNK))
        try:
            self._open()
            self._push()
        except OSError as error:
            self._broken = error
        except LinkError:  # it has ended at once; the first call raises
            pass
        _links.add(self)

    @property
    def traffic(self) -> Traffic:
        """Bytes exchanged so far."""
        return Traffic(self._sent, self._received)

    @property
    def has_room(self) -> bool:
        """Whether there is room for a step's gradient."""
        return self._bytes_waiting < ROOM_BYTES

    def send(
        self,
        kind: FrameKind,
        payload: bytes | Sequence[Content] = b"",
        *,
        rank: int,
        step: int = -1,
    ) -> None:
        """Send a frame, or queue it until there is room; its payload may be in pieces."""
        frame = pack(kind, payload, rank=rank, step=step)
        with self._lock:
            now = time.monotonic()
            lags = self._left_unread is not None or bool(self._waiting)
            if lags or now - self._looked >= SILENT_SECONDS * _LOOK:
                lags = self._lags(now)
            self._waiting.append(memoryview(frame))
            self._bytes_waiting += len(frame)
            place = self._push()
            self._left_unread = unread_bytes(place) if lags else None
            silent = now - self._progress
            if (lags and silent > SILENT_SECONDS) or self._bytes_waiting > MOST_BYTES:
                raise LinkError(
                    f"the monitor's agent has taken nothing for {silent:.0f} s, and "
                    f"{self._bytes_waiting / 2**20:.0f} MiB wait for it: it is stopped, or the "
                    "machine leaves it no time"
                )

    def poll(self) -> list[Frame]:
        """Return new frames, and send waiting ones."""
        with self._lock:
            if self._waiting:
                self._push()
            return self._pull()

    def drain(self, seconds: float) -> bool:
        """Wait until all frames are sent, also to a stopped agent; return whether they are."""
        self._wake_agent()
        until = time.monotonic() + seconds
        while True:
            with self._lock:
                self._push()
                if not self._waiting or self._connection is _Connection.SHUT:
                    return not self._waiting
                place = self._alive()
            left = until - time.monotonic()
            if left <= 0:
                return False
            select.select([], [place], [], min(left, 0.5))

    def wait(self, seconds: float) -> list[Frame]:
        """Wait for new frames up to so many seconds, and return them."""
        with self._lock:
            place = self._alive()
        select.select([place], [], [], max(seconds, 0.0))
        return self.poll()

    def close(self) -> None:
        """Close the connection, if it is open, and continue a stopped agent."""
        _links.discard(self)
        place = self._socket
        self._socket = None
        if place is not None:
            with contextlib.suppress(OSError):
                place.close()
        self._wake_agent()

    def forget(self) -> None:
        """Leave the connection to the parent, in a forked process."""
        self._lock = threading.RLock()  # another thread may have held it
        self._wake = None
        self.close()

    def _wake_agent(self) -> None:
        """Continue a stopped agent: it ends by itself once its ranks have ended."""
        if self._wake is not None:
            self._wake()

    # With the lock held ----------------------------------------------------------------------

    def _lags(self, now: float) -> bool:
        """Return whether the agent has unread bytes; record the time of its progress."""
        unread = unread_bytes(self._alive())
        lags = bool(unread or self._waiting)
        if not lags or (self._left_unread is not None and unread < self._left_unread):
            self._progress = now
        self._looked = now
        return lags

    def _open(self) -> None:
        place = self._connect()
        place.setblocking(False)
        with contextlib.suppress(OSError):
            place.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._identity = identity(place)
        self._socket = place
        self._reader = FrameReader()
        self._waiting.appendleft(memoryview(self._hello))
        self._bytes_waiting += len(self._hello)

    def _alive(self) -> socket.socket:
        """Return the socket; raise a LinkError if it is no longer ours."""
        if self._broken is not None:
            why = self._broken.strerror or self._broken
            raise LinkError(f"the monitor's agent cannot be reached ({why})") from self._broken
        place = self._socket
        if place is None or identity(place) != self._identity:
            if place is not None:
                self._socket = None
                place.detach()  # the descriptor belongs to another file now
            raise LinkError("the connection to the monitor's agent was closed in this process")
        return place

    def _push(self) -> socket.socket:
        """Send as many waiting bytes as there is room for; return the socket."""
        if self._connection is _Connection.IN_CALL:
            self._open_again()
        place = self._alive()
        while self._waiting:
            view = self._waiting[0]
            if self._frame is None:
                self._frame = view.obj if isinstance(view.obj, bytes) else bytes(view)
            self._connection = _Connection.IN_CALL
            try:
                count = place.send(view, QUIETLY)
            except BlockingIOError:
                self._connection = _Connection.OPEN
                break
            except OSError as error:
                self._connection = _Connection.OPEN
                if has_incoming(place):  # read its reason first
                    self._connection = _Connection.SHUT
                    break
                self._end(error)
            if count == len(view):
                self._waiting.popleft()
                self._frame = None
            else:
                self._waiting[0] = view[count:]
            self._connection = _Connection.OPEN
            self._bytes_waiting -= count
            self._sent += count
            if not TELLS_UNREAD:
                self._progress = time.monotonic()
        return place

    def _open_again(self) -> None:
        """Open another connection: the number of bytes sent on this one is unknown."""
        self._connection = _Connection.OPEN
        if self._socket is not None:
            self._socket.close()
        if self._frame is not None and self._waiting:
            if self._waiting[0].obj is self._frame:
                self._waiting.popleft()
            if self._frame is not self._hello:
                self._waiting.appendleft(memoryview(self._frame))
        self._frame = None
        try:
            self._open()
        except OSError as error:
            self._end(error)
        self._bytes_waiting = sum(map(len, self._waiting))

    def _pull(self) -> list[Frame]:
        if self._connection is _Connection.IN_CALL:
            self._open_again()
        place = self._alive()
        frames: list[Frame] = []
        while True:
            self._connection = _Connection.IN_CALL
            try:
                size = place.recv_into(self._chunk)
            except BlockingIOError:
                self._connection = _Connection.OPEN
                return frames
            except OSError as error:
                self._connection = _Connection.OPEN
                if frames:
                    return frames
                self._end(error)
            if not size:
                self._connection = _Connection.OPEN
                if frames:
                    return frames
                self._end(None)
            try:
                frames += self._reader.feed(self._chunk[:size])
            except FrameError as error:
                raise LinkError(str(error)) from error
            self._received += size
            self._connection = _Connection.OPEN

    def _end(self, error: OSError | None) -> None:
        why = "" if error is None else f" ({error.strerror or error})"
        raise AgentEndedError(f"the monitor's agent has ended{why}") from error


_links: "weakref.WeakSet[Link]" = weakref.WeakSet()


def _forget_all() -> None:
    for link in tuple(_links):
        link.forget()


os.register_at_fork(after_in_child=_forget_all)


_log = logging.getLogger("rankscope")

_BACKLOG = 1024
_LEFT_OUT = frozenset(
    {
        "PYTHONSTARTUP",
        "PYTHONINSPECT",
        "PYTHONPROFILEIMPORTTIME",
        "PYTHONWARNINGS",
        "RANKSCOPE_RUN",
        "RANKSCOPE_RUN_PID",
    }
)
_processes: "list[subprocess.Popen[bytes]]" = []  # until they have ended, so that none is a zombie

IN_THREAD = "RANKSCOPE_AGENT"  # environment variable: agents run in a ``process`` or a ``thread``

LOG_FILE = "RANKSCOPE_AGENT_LOG"
"""Environment variable with a file for the error output of an agent's process."""


def listen() -> tuple[socket.socket, str]:
    """Return a listening socket, and its address for local ranks."""
    place = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if sys.platform == "linux":
        address = f"@rankscope-{secrets.token_hex(12)}"
    else:
        address = str(Path(tempfile.mkdtemp(prefix="rs-")) / "s")
    place.bind(_for_system(address))
    place.listen(_BACKLOG)
    return place, address


def connect(address: str, problem: str = "") -> socket.socket:
    """Return a connection to the agent; an OSError without one, for the reason in ``problem``."""
    if not address:
        raise OSError(0, problem or "none could be started")
    place = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        place.connect(_for_system(address))
    except OSError:
        place.close()
        raise
    return place


def start_agent(listening: socket.socket, secret: str, *, thread: bool) -> "Started":
    """Start the agent behind a socket, which then belongs to the agent."""
    problem: OSError | None = None
    if not thread:
        try:
            return Started(process=_start_process(listening, secret))
        except OSError as error:
            problem = error
    from rankscope.agent.process import serve_in_thread

    agent, in_thread = serve_in_thread(listening, secret)
    if problem is not None:
        _log.warning(
            "the monitor's agent runs in a thread of this process, since no other can be "
            "started (%s)",
            problem.strerror or problem,
        )
    return Started(thread=in_thread, agent=agent)


class Started:
    """An agent that this process has started: in a process, or in a thread with ``agent``."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes] | None" = None,
        thread: threading.Thread | None = None,
        agent: "Agent | None" = None,
    ) -> None:
        self._process = process
        self._thread = thread
        self.agent = agent
        self._pid = os.getpid()

    @property
    def pid(self) -> int | None:
        """Its process id; None in a thread."""
        return None if self._process is None else self._process.pid

    def wake(self) -> None:
        """Continue its process if it was stopped."""
        process = self._process
        if process is None or os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):
            if process.poll() is None:
                watch = ProcessWatch(process.pid)
                if watch.state() is ProcessState.STOPPED:
                    process.send_signal(signal.SIGCONT)
                watch.close()

    def ending(self, seconds: float) -> str:
        """Wait up to so long, and return how its process ended; empty if it has not."""
        if self._process is None or os.getpid() != self._pid:
            return ""
        self.wait(seconds)
        code = self._process.poll()
        return "" if code is None else ending_of(code)

    def busy_seconds(self) -> tuple[float, float]:
        """Return the time in which its process computed, and waited for a CPU; 0 if unknown."""
        if self._process is None or os.getpid() != self._pid:
            return 0.0, 0.0
        return busy_seconds_of(self._process.pid)

    def wait(self, seconds: float) -> None:
        """Wait up to so long for its end."""
        if os.getpid() != self._pid:
            return
        if self._thread is not None:
            self._thread.join(seconds)
        elif self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)


def _start_process(listening: socket.socket, secret: str) -> "subprocess.Popen[bytes]":
    if not sys.executable or getattr(sys, "frozen", False):  # then it is the training's program
        raise OSError(0, "this Python does not know where it lies")
    # As 0, 1 or 2, where the training has closed its own, it would not reach the process.
    descriptor = fcntl.fcntl(listening, fcntl.F_DUPFD_CLOEXEC, 3)
    reading, writing = os.pipe()
    try:
        os.write(writing, secret.encode() + b"\n")  # before there is a reader that may end
        os.close(writing)
        with Path(os.environ.get(LOG_FILE) or os.devnull).open("a") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "rankscope.agent"),
                    *(str(descriptor), str(os.getpid())),
                ],
                stdin=reading,
                stdout=log,
                stderr=log,
                pass_fds=(descriptor,),
                start_new_session=True,
                env=_environment(),
            )
    finally:
        os.close(reading)
        os.close(descriptor)
    listening.close()
    _processes[:] = [each for each in (*_processes, process) if each.poll() is None]
    return process


def _environment() -> dict[str, str]:
    """Return an environment with this process's import path and no accelerator.

    The standard library comes first: a script's ``queue.py`` must not shadow it.
    """
    here = str(Path(__file__).resolve().parents[2])
    library: set[str | None] = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    script, *others = sys.path or [""]
    library |= {f"{place}/lib-dynload" for place in library}
    own = [place for place in others if place in library]
    places = [*own, here, *others, script]
    paths = [str(Path(place).absolute()) for place in places if place]
    environment = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    if sys.flags.ignore_environment:
        environment = {k: v for k, v in environment.items() if not k.startswith("PYTHON")}
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    environment["CUDA_VISIBLE_DEVICES"] = environment["HIP_VISIBLE_DEVICES"] = ""
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Larger blocks return to the system when freed; else glibc would keep ever more memory.
    environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(256 << 10))
    return environment


def _for_system(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address

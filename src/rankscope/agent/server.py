"""The agent's end of its host's sockets: a thread that only reads and writes.

Training processes must find room in their sockets while the agent is busy, so reading has a thread
of its own. Frames wait in memory until the agent takes them.
"""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from rankscope.agent.frames import (
    QUIETLY,
    Frame,
    FrameError,
    FrameKind,
    FrameReader,
    has_incoming,
    is_of_another_user,
)

_log = logging.getLogger("rankscope")

GRACE_SECONDS = 1.0  # how long a live rank may take to reconnect after its connection was lost

MOST_OUT_BYTES = 256 << 20  # that may wait for a rank that reads nothing, as its training hangs

MOST_HELD_BYTES = 128 << 20
"""With more bytes waiting for the agent, reading stops until it has taken them.

Ranks then find no room, and leave gradients out.
"""

HELLO_SECONDS = 10.0  # how long a connection may take to send its hello frame

_HELLO_BYTES = 8 << 20  # that it may send before that
_LOOK_SECONDS = 0.25
_CHUNK = 1 << 20


class Arrived(NamedTuple):
    """A frame from a rank, or None when its connection has ended for good; and the Unix time."""

    rank: int
    frame: Frame | None
    time: float


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    reader: FrameReader = field(default_factory=FrameReader)
    rank: int = -1
    since: float = field(default_factory=time.monotonic)
    received: int = 0
    outgoing: deque[memoryview] = field(default_factory=deque)
    waiting: int = 0


class LocalServer:
    """Serves the connections of local ranks.

    ``check`` returns the rank of a connection from its first frame, None to reject it; ``lives``
    whether a rank's process still runs, None if unknown.
    """

    def __init__(
        self,
        listening: socket.socket,
        check: Callable[[Frame], int | None],
        *,
        introduce: Callable[[int, Frame, socket.socket], None],
        lives: Callable[[int], bool | None],
    ) -> None:
        self._listening = listening
        self._check = check
        self._introduced = introduce
        self._lives = lives
        self._lock = threading.Lock()
        self._arrived: deque[Arrived] = deque()
        self._has_arrived = threading.Event()
        self._connections: dict[int, _Connection] = {}
        self._unidentified: list[_Connection] = []
        self._held = 0
        self._looked = 0.0
        self._lost: dict[int, tuple[float, float]] = {}  # by both clocks
        self._closing = False
        self.newest = -1  # the newest step that some rank has sent
        self.unread: Counter[int] = Counter()  # frames not sent to a rank, as it reads nothing
        self._wake_in, self._wake_out = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for each in (listening, self._wake_in, self._wake_out):
            each.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._woken)
        self._thread = threading.Thread(target=self._run, name="rankscope-agent-io", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    # In the agent's thread -------------------------------------------------------------------

    def take(self, seconds: float) -> list[Arrived]:
        """Wait for new frames up to so many seconds, and return them."""
        self._has_arrived.wait(seconds)
        self._has_arrived.clear()
        if not self._thread.is_alive():
            raise RuntimeError("the agent's thread that reads has ended")
        with self._lock:
            arrived = list(self._arrived)
            self._arrived.clear()
            self._held = 0
        return arrived

    def send(self, rank: int, content: bytes) -> None:
        """Send a frame to a local rank, if it is connected."""
        with self._lock:
            connection = self._connections.get(rank)
            if connection is None:
                return
            full = connection.waiting > MOST_OUT_BYTES
            if not full:
                connection.outgoing.append(memoryview(content))
                connection.waiting += len(content)
        if full:
            self.unread[rank] += 1
            if self.unread[rank] == 1:
                _log.warning(
                    "rank %d has read nothing for so long that some results are not sent to it: "
                    "its training hangs, or its on_finding does not return",
                    rank,
                )
        self._wake()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The connected ranks."""
        with self._lock:
            return tuple(sorted(self._connections))

    def close(self, seconds: float) -> None:
        """Wait up to so long until all frames are sent, and close all connections."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._thread.is_alive():
            with self._lock:
                if not any(each.outgoing for each in self._connections.values()):
                    break
            time.sleep(0.005)
        self._closing = True
        self._wake()
        self._thread.join(max(until - time.monotonic(), 0.2))
        for connection in (*self._connections.values(), *self._unidentified):
            connection.socket.close()
        for each in (self._listening, self._wake_in, self._wake_out):
            each.close()
        self._selector.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_out.send(b".")

    # In the reading thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            for key, events in self._selector.select(0.25):
                key.data(key.fileobj, events)
            if self._held > MOST_HELD_BYTES:
                time.sleep(0.01)
            now = time.monotonic()
            if now - self._looked > _LOOK_SECONDS or self._lost:
                self._looked = now
                self._give_up_lost(now)

    def _accept(self, listening: socket.socket, events: int) -> None:
        with contextlib.suppress(OSError):
            accepted, _ = listening.accept()
            if is_of_another_user(accepted):
                accepted.close()
                return
            accepted.setblocking(False)
            connection = _Connection(accepted)
            self._unidentified.append(connection)
            self._selector.register(
                accepted, selectors.EVENT_READ, lambda _, e: self._serve(connection, e)
            )

    def _woken(self, end: socket.socket, events: int) -> None:
        with contextlib.suppress(OSError):
            end.recv(_CHUNK)
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            self._write(connection)

    def _serve(self, connection: _Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write(connection)
        if events & selectors.EVENT_READ and self._held <= MOST_HELD_BYTES:
            self._read(connection)

    def _read(self, connection: _Connection) -> bool:
        """Read once; return whether more may follow."""
        try:
            data = connection.socket.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        try:
            frames = connection.reader.feed(data)
        except FrameError:
            data = b""
        if not data:
            self._drop(connection)
            return False
        now = time.time()
        for frame in frames:
            if connection.rank < 0 and not self._introduce(connection, frame):
                return False
            self.newest = max(self.newest, frame.step if frame.kind == FrameKind.STEP else -1)
            self._note(Arrived(connection.rank, frame, now))
        connection.received += len(data)
        if connection.rank < 0 and connection.received > _HELLO_BYTES:
            self._drop(connection)
        return True

    def _introduce(self, connection: _Connection, frame: Frame) -> bool:
        rank = self._check(frame) if frame.kind == FrameKind.HELLO else None
        if rank is None:
            self._drop(connection)
            return False
        previous = self._connections.get(rank)
        while previous is not None and self._read(previous):
            pass  # its frames from the connection before
        with self._lock:
            connection.rank = rank
            self._connections[rank] = connection
            self._lost.pop(rank, None)
        self._unidentified.remove(connection)
        if previous is not None:
            self._drop(previous)
        self._introduced(rank, frame, connection.socket)
        return True

    def _write(self, connection: _Connection) -> None:
        while True:
            with self._lock:
                if not connection.outgoing:
                    break
                view = connection.outgoing[0]
            try:
                count = connection.socket.send(view, QUIETLY)
            except BlockingIOError:
                break
            except OSError:
                return  # reading finds its end, too
            with self._lock:
                connection.waiting -= count
                if count == len(view):
                    connection.outgoing.popleft()
                else:
                    connection.outgoing[0] = view[count:]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outgoing else 0)
        with contextlib.suppress(KeyError, ValueError):
            key = self._selector.get_key(connection.socket)
            if key.events != events:
                self._selector.modify(connection.socket, events, key.data)

    def _drop(self, connection: _Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection in self._unidentified:
            self._unidentified.remove(connection)
        with self._lock:
            if self._connections.get(connection.rank) is connection:
                del self._connections[connection.rank]
                self._lost[connection.rank] = time.monotonic(), time.time()

    def _give_up_lost(self, now: float) -> None:
        """Give up ranks that have ended, also where a forked process holds the socket."""
        for connection in tuple(self._unidentified):
            if now - connection.since > HELLO_SECONDS:
                self._drop(connection)
        for connection in list(self._connections.values()):
            if self._lives(connection.rank) is False and not has_incoming(connection.socket):
                self._drop(connection)
        for rank, (since, at) in list(self._lost.items()):
            if self._lives(rank) is False or now - since > GRACE_SECONDS:
                with self._lock:
                    self._lost.pop(rank, None)
                self._note(Arrived(rank, None, at))

    def _note(self, arrived: Arrived) -> None:
        with self._lock:
            self._arrived.append(arrived)
            self._held += 0 if arrived.frame is None else len(arrived.frame.payload)
        self._has_arrived.set()

"""The probe's end of the socket to its agent: no call but ``drain`` and ``wait`` blocks.

The kernel keeps what was sent when this process is killed, and the agent reads it. What does not
fit into the socket waits in memory, in order, up to a limit.

Ctrl-C may be raised between a call of the system and the note of how much it has taken. What lies
on the socket is not known then, so the next call opens another one and sends the frame again; the
agent knows a step that it has already.
"""

import contextlib
import math
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rankscope.agent.frames import Frame, FrameError, FrameKind, FrameReader, pack
from rankscope.agent.sockets import QUIETLY, TELLS_UNREAD, has_incoming, identity, unread_bytes
from rankscope.bus.probe import Content
from rankscope.errors import RankscopeError

ROOM_BYTES = 1 << 20
"""With more than this waiting, gradients are left out of steps."""

MOST_BYTES = 32 << 20
"""With more than this waiting, the agent takes nothing any more."""

SILENT_SECONDS = 60.0
"""The same after so long a time in which it took nothing, with something waiting."""

_SEND_BUFFER = 4 << 20  # the kernel gives less where it must
_CHUNK = 1 << 16
_LOOK = 1 / 60  # of that time passes between two looks at an agent that keeps up

Connect = Callable[[], socket.socket]


class LinkError(RankscopeError):
    """The agent is out of reach."""


class AgentEndedError(LinkError):
    """The agent has ended or records nothing more, for all ranks of its host alike."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one worker has exchanged with its agent.

    Attributes:
        sent: Bytes sent.
        received: Bytes received.
    """

    sent: int = 0
    received: int = 0

    @property
    def total(self) -> int:
        """Bytes sent plus received."""
        return self.sent + self.received


class Link:
    """Sends frames to the agent, and takes what it sends back.

    An agent that cannot be reached is told by the first call, not by the constructor: the training
    has begun on all ranks, and goes on.

    Args:
        connect: Returns a new connection to the agent.
        hello: The first frame of every connection.
        wake: Lets the agent go on if somebody has stopped it; None where that is not known.
    """

    def __init__(
        self, connect: Connect, hello: bytes, wake: Callable[[], None] | None = None
    ) -> None:
        self._connect = connect
        self._hello = hello
        self._wake = wake
        self._broken: OSError | None = None  # since the beginning
        self._lock = threading.Lock()
        self._waiting: deque[memoryview] = deque()
        self._frame: bytes | None = None  # of which a part may have been sent
        self._bytes_waiting = 0
        self._left_unread: int | None = None  # after the last frame, if the agent lags behind
        self._progress, self._looked = time.monotonic(), -math.inf
        self._sent = self._received = 0
        self._in_system_call = self._shut = False
        self._socket: socket.socket | None = None
        self._reader = FrameReader()
        self._chunk = memoryview(bytearray(_CHUNK))
        try:
            self._open()
            self._push()
        except OSError as error:
            self._broken = error
        except LinkError:  # it has ended at once; the first call says so
            pass
        _links.add(self)

    @property
    def traffic(self) -> Traffic:
        """What was exchanged so far."""
        return Traffic(self._sent, self._received)

    @property
    def has_room(self) -> bool:
        """Whether a step may bring its gradient along."""
        return self._bytes_waiting < ROOM_BYTES

    def send(
        self,
        kind: FrameKind,
        payload: bytes | Sequence[Content] = b"",
        *,
        rank: int,
        step: int = -1,
    ) -> None:
        """Hand a frame over, or keep it until there is room; its payload may be in pieces.

        Raises:
            LinkError: The agent has ended, or takes nothing any more.
        """
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
        """Return what has come in by now, and push what waits.

        Raises:
            LinkError: The agent has ended. What it sent before is returned first.
        """
        with self._lock:
            if self._waiting:
                self._push()
            return self._pull()

    def drain(self, seconds: float) -> bool:
        """Wait until everything is handed over, also to an agent that was stopped till now.

        Returns:
            Whether it is.

        Raises:
            LinkError: The agent has ended.
        """
        self._wake_agent()
        until = time.monotonic() + seconds
        while True:
            with self._lock:
                self._push()
                if not self._waiting or self._shut:
                    return not self._waiting
                place = self._alive()
            left = until - time.monotonic()
            if left <= 0:
                return False
            select.select([], [place], [], min(left, 0.5))

    def wait(self, seconds: float) -> list[Frame]:
        """Return what comes in, as soon as something does; nothing after so many seconds.

        Raises:
            LinkError: The agent has ended.
        """
        with self._lock:
            place = self._alive()
        select.select([place], [], [], max(seconds, 0.0))
        return self.poll()

    def close(self) -> None:
        """Close the connection, if it is open, and let a stopped agent go on."""
        _links.discard(self)
        place, self._socket = self._socket, None
        if place is not None:
            with contextlib.suppress(OSError):
                place.close()
        self._wake_agent()

    def forget(self) -> None:
        """Leave the connection to the process that this one was forked from."""
        self._lock = threading.Lock()  # another thread may have held it
        self._wake = None
        self.close()

    def _wake_agent(self) -> None:
        """Let a stopped agent go on: it ends by itself once it knows that its ranks are gone."""
        if self._wake is not None:
            self._wake()

    # With the lock held ----------------------------------------------------------------------

    def _lags(self, now: float) -> bool:
        """Return whether the agent has left something unread; note when it has not, or has read."""
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
        """Return the socket, if it still is one of ours.

        A script may close all files that it does not know, and open others in their place.

        Raises:
            LinkError: It is not.
        """
        if self._broken is not None:
            why = self._broken.strerror or self._broken
            raise LinkError(f"the monitor's agent cannot be reached ({why})") from self._broken
        place = self._socket
        if place is None or identity(place) != self._identity:
            if place is not None:
                self._socket = None
                place.detach()  # the number belongs to somebody else by now
            raise LinkError("the connection to the monitor's agent was closed in this process")
        return place

    def _push(self) -> socket.socket:
        """Send what waits, as much as there is room for; return the socket."""
        if self._in_system_call:
            self._open_again()
        place = self._alive()
        while self._waiting:
            view = self._waiting[0]
            if self._frame is None:
                self._frame = view.obj if isinstance(view.obj, bytes) else bytes(view)
            self._in_system_call = True
            try:
                count = place.send(view, QUIETLY)
            except BlockingIOError:
                self._in_system_call = False
                break
            except OSError as error:
                self._in_system_call = False
                self._shut = has_incoming(place)  # it says why before it ends
                if self._shut:
                    break
                self._end(error)
            if count == len(view):
                self._waiting.popleft()
                self._frame = None
            else:
                self._waiting[0] = view[count:]
            self._in_system_call = False
            self._bytes_waiting -= count
            self._sent += count
            if not TELLS_UNREAD:
                self._progress = time.monotonic()
        return place

    def _open_again(self) -> None:
        """Open another connection, since what has reached the agent on this one is not known."""
        self._in_system_call = False
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
        if self._in_system_call:
            self._open_again()
        place = self._alive()
        frames: list[Frame] = []
        while True:
            self._in_system_call = True
            try:
                size = place.recv_into(self._chunk)
            except BlockingIOError:
                self._in_system_call = False
                return frames
            except OSError as error:
                self._in_system_call = False
                if frames:
                    return frames
                self._end(error)
            if not size:
                self._in_system_call = False
                if frames:
                    return frames
                self._end(None)
            try:
                frames += self._reader.feed(self._chunk[:size])
            except FrameError as error:
                raise LinkError(str(error)) from error
            self._received += size
            self._in_system_call = False

    def _end(self, error: OSError | None) -> None:
        why = "" if error is None else f" ({error.strerror or error})"
        raise AgentEndedError(f"the monitor's agent has ended{why}") from error


_links: "weakref.WeakSet[Link]" = weakref.WeakSet()


def _forget_all() -> None:
    for link in tuple(_links):
        link.forget()


os.register_at_fork(after_in_child=_forget_all)

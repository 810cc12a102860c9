"""The training's end of the socket to its agent: no call but ``drain`` and ``wait`` blocks.

When this process is killed, the kernel keeps sent bytes, and the agent reads them. Frames that do
not fit into the socket wait in memory, in order, up to a limit.

Ctrl-C may be raised between a system call and the update of the number of sent bytes. Then the
next call opens another connection and sends the frame again; the agent ignores a repeated step.
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
from rankscope.bus.probe import Content
from rankscope.errors import RankscopeError

ROOM_BYTES = 1 << 20
"""With more bytes waiting, steps are sent without gradients."""

MOST_BYTES = 32 << 20
"""With more bytes waiting, the agent counts as lost."""

SILENT_SECONDS = 60.0
"""The same after this long without progress, with frames waiting."""

_SEND_BUFFER = 4 << 20  # the kernel gives less where it must
_CHUNK = 1 << 16
_LOOK = 1 / 60  # share of that time between two looks at an agent that keeps up

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
        self._in_system_call = self._shut = False
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
                if not self._waiting or self._shut:
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
        """Return the socket; raise a LinkError if it is no longer ours.

        A script may close all files that it does not know, and open others in their place.
        """
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
                self._shut = has_incoming(place)  # read its reason first
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
        """Open another connection: the number of bytes sent on this one is unknown."""
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

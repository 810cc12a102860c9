"""Frames: the messages between training process, agent and root, on a byte stream.

A frame is a header (length of the payload, kind, rank, step) and a payload. The rank is its sender
or receiver; -1 stands for all ranks. The states of the Unix sockets are here, too, for both ends.
"""

import contextlib
import fcntl
import os
import socket
import struct
import sys
import termios
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from rankscope.bus.probe import Content
from rankscope.errors import RankscopeError

HEADER = struct.Struct("<IHHiq")  # bytes of payload, mark, kind, rank, step
MARK = 0x5253
MAX_PAYLOAD = 1 << 30
ALL_RANKS = -1
GUESTS = 1 << 30  # added to the rank of a guest, a rank of another run of the same mesh


class FrameKind(IntEnum):
    """The kinds of frames."""

    # From a training process.
    HELLO = 1  # rank, secret and setup, as JSON; the first frame of a connection
    STEP = 2  # a step as :mod:`rankscope.agent.step_message` packs it
    EVIDENCE = 3  # data for the director of one kind of evidence, also from a guest: see ``tag``
    SUBSCRIBE = 4  # request to send the report of each step from now on
    BYE = 5  # no more steps follow; the reason, as JSON

    INVITATION = 6  # the root's addresses and keys for other hosts; also from its agent to rank 0

    # To training processes.
    WELCOME = 19  # the agent's process id: that process may inspect this one in a hang
    INTERVAL = 20  # the interval at which gradients are measured from a step on
    FINDINGS = 21  # that opened or changed; ``on_finding`` gets them at the beginning of a step
    REQUEST = 22  # a director's request to the probes of its kind
    LATEST = 24  # the latest report
    LOG = 25  # a line for the log of the training
    OFF = 26  # nothing is recorded from now on; the reason
    WORKING = 28  # keepalive while the root judges the last steps of a run
    ANNOUNCE = 29  # a line about findings for the error stream; as JSON, with its level
    DONE = 27  # the run is closed; the last frame. Its step is 1 if all of it could be written

    # Between agents.
    GONE = 40  # a rank has ended without a BYE; how, as JSON
    STATES = 41  # states, places or stacks of a host's processes, as JSON
    LOOK = 42  # request for the states of a host's processes
    STACKS = 43  # request for the stacks of a host's processes
    SUMMARY = 44  # a step of all ranks of a host, see :mod:`rankscope.agent.host_summary`
    INTRODUCE = 45  # request to send a host's lasting frames again: the link was broken or full


class Frame(NamedTuple):
    """One frame; ``rank`` is its sender or receiver, ``step`` is -1 without one."""

    kind: int
    rank: int
    step: int
    payload: bytes


class FrameError(RankscopeError):
    """The received bytes are no frame: another program or version is at the other end."""


def pack(
    kind: FrameKind,
    payload: bytes | Sequence[Content] = b"",
    *,
    rank: int = ALL_RANKS,
    step: int = -1,
) -> bytes:
    """Return a frame's bytes; its payload may be in pieces."""
    pieces = (payload,) if isinstance(payload, bytes) else payload
    size = sum(map(len, pieces))
    return b"".join((HEADER.pack(size, MARK, kind, rank, step), *pieces))


class FrameReader:
    """Splits a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """Add bytes in order of arrival; return the frames that are complete."""
        self._buffer += data
        frames = []
        at = 0
        while len(self._buffer) - at >= HEADER.size:
            size, mark, kind, rank, step = HEADER.unpack_from(self._buffer, at)
            if mark != MARK or size > MAX_PAYLOAD:
                raise FrameError(f"expected a frame, got {bytes(self._buffer[at : at + 8])!r}")
            end = at + HEADER.size + size
            if len(self._buffer) < end:
                break
            frames.append(Frame(kind, rank, step, bytes(self._buffer[at + HEADER.size : end])))
            at = end
        if at:
            del self._buffer[:at]
        return frames


QUIETLY = getattr(socket, "MSG_NOSIGNAL", 0)  # a script may let SIGPIPE end its process

TELLS_UNREAD = sys.platform == "linux"  # whether ``unread_bytes`` works on this system

_PEER = struct.Struct("3i")  # pid, uid, gid
_COUNT = struct.Struct("i")


def unread_bytes(place: socket.socket) -> int:
    """Return the number of sent bytes that the other end has not read; 0 where unknown."""
    if TELLS_UNREAD:
        with contextlib.suppress(OSError):
            return int(_COUNT.unpack(fcntl.ioctl(place, termios.TIOCOUTQ, bytes(_COUNT.size)))[0])
    return 0


def has_incoming(place: socket.socket) -> bool:
    """Return whether a non-blocking socket has bytes to read."""
    try:
        return bool(place.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def identity(place: socket.socket) -> tuple[int, int] | None:
    """Return device and inode of a socket, to detect a reused descriptor; None without a socket."""
    try:
        state = os.fstat(place.fileno())
    except OSError:
        return None
    return state.st_dev, state.st_ino


def is_of_another_user(place: socket.socket) -> bool:
    """Return whether another user is at the other end; False where unknown."""
    if not hasattr(socket, "SO_PEERCRED"):
        return False
    peer = place.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(peer)[1] != os.geteuid())

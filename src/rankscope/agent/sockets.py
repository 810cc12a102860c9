"""States of Unix sockets, for both ends."""

import contextlib
import fcntl
import os
import socket
import struct
import sys
import termios

QUIETLY = getattr(socket, "MSG_NOSIGNAL", 0)
"""Flags to send with: a script may let SIGPIPE end its process."""

TELLS_UNREAD = sys.platform == "linux"
"""Whether :func:`unread_bytes` works on this system."""

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
    """Return whether another user is at the other end; False where unknown.

    An abstract socket is open to all users.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return False
    peer = place.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(peer)[1] != os.geteuid())

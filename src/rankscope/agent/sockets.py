"""What the system tells of a Unix socket, to either end of it."""

import contextlib
import fcntl
import os
import socket
import struct
import sys
import termios

QUIETLY = getattr(socket, "MSG_NOSIGNAL", 0)
"""To send with: a script may have SIGPIPE end its process."""

TELLS_UNREAD = sys.platform == "linux"
"""Whether :func:`unread_bytes` knows."""

_PEER = struct.Struct("3i")  # pid, uid, gid
_COUNT = struct.Struct("i")


def unread_bytes(place: socket.socket) -> int:
    """Return what the other end has not read of what was sent; 0 where the system does not tell."""
    if TELLS_UNREAD:
        with contextlib.suppress(OSError):
            return int(_COUNT.unpack(fcntl.ioctl(place, termios.TIOCOUTQ, bytes(_COUNT.size)))[0])
    return 0


def has_incoming(place: socket.socket) -> bool:
    """Return whether there is something to read, of a socket that does not block."""
    try:
        return bool(place.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def identity(place: socket.socket) -> tuple[int, int] | None:
    """Return what stays the same as long as a number means this socket; None if it means none."""
    try:
        state = os.fstat(place.fileno())
    except OSError:
        return None
    return state.st_dev, state.st_ino


def is_of_another_user(place: socket.socket) -> bool:
    """Return whether another user is at the other end; False where the system does not tell.

    A socket without a place in a file system is open to all of them.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return False
    peer = place.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(peer)[1] != os.geteuid())

"""The writer's lock of a run, which ends with the writer's process, however that ends.

It only counts on the writer's own machine: locks on file servers are unreliable.
"""

import contextlib
import json
import os
import secrets
import socket
from pathlib import Path

LOCK_FILE = ".writer"
"""Locked as long as the run is written; removed when it is closed."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MOST_BYTES = 1000


class WriterLock:
    """Held by the process that writes a run; does nothing on systems without such locks."""

    def __init__(self, run: Path) -> None:
        self._path = run / LOCK_FILE
        self._descriptor: int | None = None
        hidden = run / f"{LOCK_FILE}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        try:
            self._take(hidden)
        except (OSError, ImportError):
            self.release()
        finally:
            with contextlib.suppress(OSError):
                hidden.unlink()

    def release(self, *, closed: bool = True) -> None:
        """Release the lock; ``closed``: ``run.json`` has the end, so that the file can go."""
        if self._descriptor is None:
            return
        if closed:
            with contextlib.suppress(OSError):
                self._path.unlink()
        os.close(self._descriptor)
        self._descriptor = None

    def _take(self, hidden: Path) -> None:
        import fcntl

        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(hidden, flags, 0o644)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._descriptor, json.dumps(_machine()).encode())
        hidden.rename(self._path)  # no reader sees it unlocked


def writer_is_gone(run: Path) -> bool:
    """Return whether the process that wrote a run has ended without closing it.

    False, too, where that is unknown: on another machine, or before there were locks.
    """
    try:
        import fcntl

        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(run / LOCK_FILE, flags)
        try:
            if not _was_here(json.loads(os.read(descriptor, _MOST_BYTES))):
                return False
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
    except (OSError, ValueError, ImportError):
        return False
    return True


def _machine() -> list[str]:
    try:
        return [socket.gethostname(), _BOOT.read_text().strip()]
    except OSError:
        return [socket.gethostname(), ""]


def _was_here(machine: object) -> bool:
    """Return whether a process ran on this machine, perhaps before a reboot."""
    own = _machine()
    if machine == own or not isinstance(machine, list) or len(machine) != 2:
        return machine == own
    return bool(machine[1] == own[1] != "" or machine[0] == own[0] != "localhost")

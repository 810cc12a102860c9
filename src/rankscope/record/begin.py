"""Begins a run: one job claims its directory with ``run.json``, which describes the run.

The training does this before its first step, so that write errors are raised at once. The agent
writes the rest, and holds a lock that ends with its process, however that ends. The lock only
counts on the writer's own machine: locks on file servers are unreliable.
"""

import contextlib
import json
import os
import platform
import secrets
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.files import (
    claim,
    create_directory,
    is_file,
    parse,
    read_file,
    replace,
    staged,
    to_plain,
)
from rankscope.record.states import START_FILE
from rankscope.version import __version__

SCHEMA_VERSION = 1  # raised when an older reader would misread a run; not for a new column alone

INFO_FILE = "run.json"  # describes a run; the job that created it owns the directory


def is_run(path: Path) -> bool:
    """Return whether a directory holds a run."""
    return is_file(path / INFO_FILE)


SHARES = {"me": 0o700, "group": 0o750, "all": 0o755}
"""Permissions of a run's directory, by who may read the run."""


def begin_run(
    path: str | Path, info: Mapping[str, Any], start: bytes = b"", share: str = "me"
) -> dict[str, Any]:
    """Claim a directory for a run, and return the content of ``run.json``.

    It is created with its parents, and may exist if it is empty but for the leftovers of a failed
    start. ``start`` is the packed initial state of the detectors, if the run continues another;
    ``share``: who may read the run, see :data:`SHARES`.
    """
    path = Path(path)
    info = {
        **info,
        "schema_version": SCHEMA_VERSION,
        "versions": {
            "rankscope": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            **info.get("versions", {}),
        },
        "status": "running",
        "started": now(),
    }
    create_directory(path, INFO_FILE, leftovers=[START_FILE], mode=SHARES[share])
    with contextlib.ExitStack() as stack:
        remembered = path / START_FILE
        hidden = stack.enter_context(staged(remembered, start)) if start else None
        claim(path / INFO_FILE, text_of(info))
        if hidden is not None:
            hidden.replace(remembered)
        else:  # not the one of a failed start
            with contextlib.suppress(OSError):
                remembered.unlink()
    return info


def end_lost_run(path: Path, agent_pid: int | None, how: str) -> None:
    """Record in ``run.json`` that a run ended with its agent, and remove its unfinished files."""
    info = parse(read_file(path / INFO_FILE))
    agent = info.get("agent") or {"pid": agent_pid}
    if info.get("status") == "running" and agent.get("pid") == agent_pid:
        info |= {"status": "incomplete", "finished": now(), "agent": {**agent, "ended": how}}
        replace(path / INFO_FILE, text_of(info))
        for hidden in path.rglob(f".*.{agent_pid}-*.tmp"):  # unfinished
            hidden.unlink(missing_ok=True)


def text_of(info: Mapping[str, Any]) -> bytes:
    """Return the content of ``run.json``."""
    return (json.dumps(to_plain(info), indent=2) + "\n").encode()


def now() -> str:
    """Return the present time as in ``run.json``."""
    return datetime.now(UTC).isoformat(timespec="seconds")


FINDINGS_FILE = "findings.jsonl"
LOCK_FILE = ".writer"  # locked as long as the run is written; removed when it is closed

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
                path = self._path
                with contextlib.suppress(OSError):  # the run's directory may have been moved
                    path = Path(f"/proc/self/fd/{self._descriptor}").readlink()
                if os.path.samestat(os.fstat(self._descriptor), path.stat()):
                    path.unlink()
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
    """Return whether a run's writer has ended without closing it; False where that is unknown."""
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


def writer_is_elsewhere(run: Path) -> bool:
    """Return whether another machine writes a run, or wrote it when it was copied."""
    try:
        return not _was_here(json.loads((run / LOCK_FILE).read_bytes()[:_MOST_BYTES]))
    except (OSError, ValueError):
        return False


def last_writer(run: Path, info: Mapping[str, Any]) -> int | None:
    """Return the process that still writes a run after all its ranks have ended; None if none.

    None, too, where a rank or the writer is on another machine.
    """
    agent = info.get("agent")
    ranks = info.get("ranks")
    if info.get("status") != "running" or not isinstance(agent, dict) or not ranks:
        return None
    here = socket.gethostname()
    if any(rank.get("host") != here or is_alive(rank.get("pid")) for rank in ranks):
        return None
    writes = (run / LOCK_FILE).exists() and not writer_is_elsewhere(run) and not writer_is_gone(run)
    return agent.get("pid") if writes else None


def is_alive(pid: object) -> bool:
    """Return whether a process exists on this host and has not ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "XZ"


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

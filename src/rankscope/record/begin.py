"""Begins a run: one job claims its directory with ``run.json``, which describes the run.

The training does this before its first step, so that write errors are raised at once. The agent
writes the rest.
"""

import contextlib
import json
import platform
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

SCHEMA_VERSION = 1
"""Raised when an older reader would misread a run; a new column alone does not raise it."""

INFO_FILE = "run.json"
"""Describes a run; the job that created it owns the directory."""


def is_run(path: Path) -> bool:
    """Return whether a directory holds a run."""
    return is_file(path / INFO_FILE)


SHARES = {"me": 0o700, "group": 0o750, "all": 0o755}
"""Permissions of a run's directory, by who may read the run."""


def begin_run(
    path: str | Path, info: Mapping[str, Any], start: bytes = b"", share: str = "me"
) -> dict[str, Any]:
    """Claim a directory for a run, and return the content of ``run.json``.

    Args:
        path: The directory; created with its parents. It may exist if it is empty, but for the
            leftovers of a failed start.
        info: The description of the run for ``run.json``: configuration, hosts, versions. Numpy
            and paths are made plain, non-finite numbers null.
        start: The packed initial state of the detectors, if the run continues another.
        share: Who may read the run, see :data:`SHARES`; a directory that exists stays as it is.

    Raises:
        RunTakenError: Another job has begun a run in it.
        RunError: The directory is not empty, or cannot be created or written.
    """
    path = Path(path)
    info = {
        **info,
        "schema_version": SCHEMA_VERSION,
        "versions": {**_versions(), **info.get("versions", {})},
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
    """Record in ``run.json`` that a run ended with its agent, unless its end is recorded already.

    The agent's unfinished files are removed.

    Args:
        path: The run's directory.
        agent_pid: The agent's process, which must have ended.
        how: How it ended.

    Raises:
        RunError: It cannot be written.
        OSError: It cannot be read.
        ValueError: It is no JSON.
    """
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


def _versions() -> dict[str, str]:
    return {
        "rankscope": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }

"""How a run begins: one job takes its directory, and says in ``run.json`` what the run is.

The training does this before its first step, so that what cannot be written is said at once. The
agent writes the rest.
"""

import contextlib
import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import rankscope
from rankscope.files import claim, create_directory, is_file, replace, staged, to_plain
from rankscope.record.states import START_FILE

SCHEMA_VERSION = 1
"""Raised when an older reader would misread a run; a new column alone does not raise it."""

INFO_FILE = "run.json"
"""Says what a run is; the job that put it there has the directory."""


def is_run(path: Path) -> bool:
    """Return whether a directory holds a run."""
    return is_file(path / INFO_FILE)


def begin_run(path: str | Path, info: Mapping[str, Any], start: bytes = b"") -> dict[str, Any]:
    """Take a directory for a run; what the detectors remember becomes visible with ``run.json``.

    Args:
        path: The directory; created with its parents. It may exist when it is empty, but for what
            a start that was cut short has left.
        info: What ``run.json`` says about the run: configuration, hosts, versions. Values that
            JSON does not know (numpy, paths) are made plain, numbers that are not finite null.
        start: What the detectors remember when the run begins, packed, if it continues another.

    Returns:
        What ``run.json`` says.

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
    create_directory(path, INFO_FILE, leftovers=[START_FILE])
    with contextlib.ExitStack() as stack:
        remembered = path / START_FILE
        hidden = stack.enter_context(staged(remembered, start)) if start else None
        claim(path / INFO_FILE, text_of(info))
        if hidden is not None:
            hidden.replace(remembered)
        else:  # one of a start that did not get so far is not this run's
            with contextlib.suppress(OSError):
                remembered.unlink()
    return info


def end_lost_run(path: Path, agent_pid: int | None, how: str) -> None:
    """Say in ``run.json`` that a run has ended with its agent, unless the agent has said its end.

    What the agent was about to write is removed.

    Args:
        path: The run's directory.
        agent_pid: The agent's process, which must have ended.
        how: How it ended.

    Raises:
        RunError: It cannot be written.
        OSError: It cannot be read.
        ValueError: It is no JSON.
    """
    info = json.loads((path / INFO_FILE).read_bytes())
    agent = info.get("agent") or {"pid": agent_pid}
    if info.get("status") == "running" and agent.get("pid") == agent_pid:
        info |= {"status": "incomplete", "finished": now(), "agent": {**agent, "ended": how}}
        replace(path / INFO_FILE, text_of(info))
        for hidden in path.rglob(f".*.{agent_pid}-*.tmp"):  # what it was writing when it ended
            hidden.unlink(missing_ok=True)


def text_of(info: Mapping[str, Any]) -> bytes:
    """Return the content of ``run.json``."""
    return (json.dumps(to_plain(info), indent=2) + "\n").encode()


def now() -> str:
    """Return the time as ``run.json`` states it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    return {
        "rankscope": rankscope.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }

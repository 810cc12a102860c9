"""Lines that a training prints by default: findings, the verdict, and the run's place."""

import contextlib
import logging
import shlex
from pathlib import Path

from rankscope.bus.words import printable

_log = logging.getLogger("rankscope")


def announce(level: int, line: str) -> None:
    """Print a line on the error stream, even below warning.

    A level of the logger ``rankscope`` takes precedence.
    """
    line = f"rankscope: {printable(line)}"
    if _log.level != logging.NOTSET:
        _log.log(level, "%s", line)
    elif not _log.disabled:
        _log.handle(_log.makeRecord(_log.name, level, __file__, 0, "%s", (line,), None))


def where_recorded(run_dir: Path, store: str = "") -> str:
    """Describe the place of a run, perhaps in an object store, and the command that shows it."""
    with contextlib.suppress(OSError, ValueError):  # outside the working directory, or none exists
        run_dir = run_dir.relative_to(Path.cwd())
    path = store or str(run_dir)
    return f"the run is recorded in {path}; to see it: rankscope report {shlex.quote(path)}"

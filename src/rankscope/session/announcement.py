"""Lines that a training prints by default: findings, the verdict, and the run's place."""

import contextlib
import logging
import shlex
from pathlib import Path

_log = logging.getLogger("rankscope")


def announce(level: int, line: str) -> None:
    """Print a line on the error stream, even below warning.

    A level of the logger ``rankscope`` takes precedence.
    """
    line = f"rankscope: {line}"
    if _log.level != logging.NOTSET:
        _log.log(level, "%s", line)
    elif not _log.disabled:
        _log.handle(_log.makeRecord(_log.name, level, __file__, 0, "%s", (line,), None))


def place_of(run_dir: Path, store: str = "") -> str:
    """Return the place of a run as the user may name it, perhaps in an object store."""
    with contextlib.suppress(OSError, ValueError):  # outside the working directory, or none exists
        run_dir = run_dir.relative_to(Path.cwd())
    return store or str(run_dir)


def last_line(place: str, judged: bool, recorded: bool) -> str:
    """Return the last line of a run: its place, and the command that shows it.

    Args:
        place: Where it was to be recorded.
        judged: Whether its last steps were judged before the training ended.
        recorded: Whether all of it could be written.
    """
    shows = f"rankscope report {shlex.quote(place)}"
    if not judged:
        return f"the last steps were not judged before the training ended; to see all: {shows}"
    if not recorded:
        return f"the run could not be recorded to its end in {place}; to see what was: {shows}"
    return f"the run is recorded in {place}; to see it: {shows}"

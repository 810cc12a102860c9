"""Lines that a training prints about itself, by default: findings, the verdict, and where it is."""

import contextlib
import logging
import shlex
from pathlib import Path

_log = logging.getLogger("rankscope")


def announce(level: int, line: str) -> None:
    """Say a line to whoever started the training, also one that is no warning.

    Where the logger ``rankscope`` has a level, that decides.
    """
    line = f"rankscope: {line}"
    if _log.level != logging.NOTSET:
        _log.log(level, "%s", line)
    elif not _log.disabled:
        _log.handle(_log.makeRecord(_log.name, level, __file__, 0, "%s", (line,), None))


def where_recorded(run_dir: Path, store: str = "") -> str:
    """Return where a run lies, and the command that shows it.

    Args:
        run_dir: Its directory.
        store: Its address in an object store, if it is there.
    """
    with contextlib.suppress(OSError, ValueError):  # it lies elsewhere, or we are nowhere
        run_dir = run_dir.relative_to(Path.cwd())
    path = store or str(run_dir)
    return f"the run is recorded in {path}; to see it: rankscope report {shlex.quote(path)}"

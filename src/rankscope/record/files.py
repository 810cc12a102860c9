"""Files that are whole at every moment, and plain JSON values to put into them."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.errors import RunError


def to_plain(value: Any) -> Any:
    """Return a value as JSON can hold it: numpy made plain, numbers that are not finite null."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return to_plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def is_file(path: Path) -> bool:
    """Return whether a path leads to a file; False, too, where that cannot be told.

    ``Path.is_file`` raises there until Python 3.14: the directory may not be entered, the name is
    too long, the server has gone.
    """
    return os.path.isfile(path)  # noqa: PTH113


def is_directory(path: Path) -> bool:
    """Return whether a path leads to a directory; False, too, where that cannot be told."""
    return os.path.isdir(path)  # noqa: PTH112


def unreadable(path: Path, error: OSError) -> RunError:
    """Return the error to raise when the system does not let a file or directory be read."""
    return RunError(
        f"cannot read {path} ({error.strerror or error}): check the path and its permissions, "
        "and try again"
    )


def create_directory(path: Path) -> None:
    """Create a directory and its parents; an empty one may be there already.

    Raises:
        RunError: It holds something, or cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        occupied = any(path.iterdir())
    except OSError as error:
        raise RunError(
            f"cannot create the run directory {path} ({error.strerror}): choose another path"
        ) from error
    if occupied:
        raise RunError(
            f"the run directory {path} already exists and is not empty: choose another or remove it"
        )


def write_error(path: Path, error: OSError) -> RunError:
    """Return the error to raise when a file of a run cannot be written."""
    return RunError(
        f"cannot write {path} ({error.strerror or error}): what was written before is intact; "
        "free space or check permissions, or choose another directory"
    )


def replace(path: Path, content: bytes) -> None:
    """Write a file as a whole: readers see the old one until the new one is on disk.

    Args:
        path: The file to write or replace.
        content: What it holds then.

    Raises:
        RunError: It cannot be written; the old file is then untouched.
    """
    hidden = path.with_name(f".{path.stem}.tmp")
    try:
        with hidden.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            hidden.unlink()
        raise write_error(path, error) from error


def append(path: Path, data: bytes) -> None:
    """Append whole lines to a file, through to the disk.

    Raises:
        RunError: They cannot be written; the file is then cut back to what it was.
    """
    try:
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(data) != len(data):
                    raise OSError("not all bytes were written")
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise
    except OSError as error:
        raise write_error(path, error) from error

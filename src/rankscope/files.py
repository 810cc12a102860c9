"""Atomic writes of files, and plain JSON values."""

import contextlib
import errno
import json
import os
import secrets
import stat
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np

from rankscope.errors import RunError

ELSEWHERE = "free some space, make the directory writable, or name another file"
"""Advice where a file cannot be written."""

DAMAGES = (
    *(OSError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError),
    *(NotImplementedError, OverflowError, RecursionError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error),
)
"""Errors of reading a damaged NumPy archive, or its JSON."""

MAX_TEXT_BYTES = 2**26
"""Largest JSON file of a run that is read: ten times the ``run.json`` of 10,240 ranks.

``findings.jsonl`` has a line for each change of a finding: at 2 kB, 30,000 of them.
"""

_PIECE = 2**20


def cache_root() -> Path:
    """Return this user's cache of rankscope: below ``$XDG_CACHE_HOME``, or ``~/.cache``.

    Raises a RuntimeError without a home directory.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "rankscope"


def read_own(path: Path) -> bytes | None:
    """Return the content of a file that only this user can write; None without such a file."""
    try:
        status = path.lstat()
        alone = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return path.read_bytes() if alone and stat.S_ISREG(status.st_mode) else None
    except OSError:
        return None


def to_plain(value: Any) -> Any:
    """Return a value as plain JSON: numpy made plain, non-finite numbers None."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return to_plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def archive_of(arrays: Mapping[str, Any]) -> bytes:
    """Return the content of a NumPy archive without pickles."""
    file = BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def is_file(path: Path) -> bool:
    """Return whether a path leads to a file; False, too, after an error.

    ``Path.is_file`` raises there until Python 3.14: the directory may not be entered, the name is
    too long, the server has gone.
    """
    return os.path.isfile(path)  # noqa: PTH113


def is_directory(path: Path) -> bool:
    """Return whether a path leads to a directory; False, too, after an error."""
    return os.path.isdir(path)  # noqa: PTH112


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file to read; a pipe or a device in its place is never waited for."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        reason = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(reason, "it is not a regular file")
    return os.fdopen(number, "rb")


class TooLongError(OSError):
    """A file is longer than any of its kind."""


def read_file(path: Path, most: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a regular file, as :func:`open_file` opens it.

    A file of a few kilobytes on disk may be gigabytes long; so nothing beyond ``most`` is read. A
    read takes memory for all that it asks for, so each asks for a piece.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size <= most:
            content = bytearray()
            while piece := file.read(min(_PIECE, most + 1 - len(content))):
                content += piece
            if len(content) <= most:
                return bytes(content)
    raise TooLongError(errno.EFBIG, f"it is longer than {most // 2**20} MiB, which no such file is")


MAX_LEVELS = 64
"""Levels of a JSON document; rankscope's own have at most a dozen."""


def parse(content: bytes | str) -> Any:
    """Parse JSON; raise a ValueError if it is malformed, or nested deeper than ``MAX_LEVELS``."""
    try:
        document = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    level = [document]
    for _ in range(MAX_LEVELS):
        level = [each for part in level for each in _parts_of(part)]
        if not level:
            return document
    raise ValueError("it is nested too deep")


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def unreadable(path: Path, error: OSError) -> RunError:
    """Return the error to raise when the system does not let a file or directory be read."""
    if isinstance(error, TooLongError):
        return RunError(f"{path} is not read: {error.strerror}; the run is damaged")
    return RunError(
        f"cannot read {path} ({error.strerror or error}): check the path and its permissions, "
        "and try again"
    )


class RunTakenError(RunError):
    """Another job has begun a run in the directory."""


def make_folder(path: Path, mode: int) -> None:
    """Create a directory of this mode, and its parents; one that exists keeps its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not is_directory(path):
            raise
    else:
        path.chmod(mode)


def create_directory(
    path: Path, mark: str, leftovers: Collection[str] = (), *, mode: int = 0o700
) -> None:
    """Create a directory and its parents; it may exist if it holds only leftovers.

    ``leftovers`` are names of files that a failed start may have left, besides hidden unfinished
    ones. A job claims the directory by the file ``mark``, see :func:`claim`. Files that are written
    into it are as readable as the directory.
    """
    try:
        make_folder(path, mode)
        names = {entry.name for entry in path.iterdir()} - {*leftovers}
    except OSError as error:
        raise RunError(
            f"cannot create the run directory {path} ({error.strerror}): choose another path"
        ) from error
    if mark in names and is_file(path / mark):
        raise RunTakenError(_not_empty(path))
    if any(not (name.startswith(".") and name.endswith(".tmp")) for name in names):
        raise RunError(_not_empty(path))


def _not_empty(path: Path) -> str:
    return f"the run directory {path} already exists and is not empty: choose another or remove it"


def write_error(path: Path, error: OSError) -> RunError:
    """Return the error to raise when a file of a run cannot be written."""
    gone = error.errno == errno.ENOENT and not is_directory(path.parent)
    look = "see where its directory was moved to" if gone else "free space or check permissions"
    return RunError(
        f"cannot write {path} ({error.strerror or error}): what was written before is intact; "
        f"{look}, or choose another directory"
    )


def replace(path: Path, content: bytes, *, after: int = 0) -> None:
    """Write or replace a file: readers see the old one until the new one is on disk.

    ``after`` bytes of the present file stay at its beginning; an error leaves it untouched.
    """
    with staged(path, content, after=after) as hidden:
        hidden.replace(path)


def overwrite(path: Path, content: bytes) -> None:
    """Write over a file within the room that it has on its disk, which may be full."""
    try:
        with path.open("r+b", buffering=0) as file:
            now = os.fstat(file.fileno())
            if len(content) > max(now.st_size, now.st_blocks * _BLOCK):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            file.write(content)
            file.truncate(len(content))
            os.fsync(file.fileno())
    except OSError as error:
        raise write_error(path, error) from error


_BLOCK = 512  # bytes, the unit of st_blocks on every system


@contextlib.contextmanager
def staged(path: Path, content: bytes, *, after: int = 0) -> Iterator[Path]:
    """Write a file to the disk under a unique hidden name, for the caller to rename or link.

    It is removed afterwards if it still exists.

    ``after`` bytes of the present file come before the content.
    """
    hidden = path.with_name(f".{path.stem}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(hidden, "xb", opener=_create) as file:
            _copy_beginning(path, after, file)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield hidden
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            hidden.unlink()


def _create(path: str, flags: int) -> int:
    """Open a file; a new one is as readable as its directory, whatever the umask."""
    number = os.open(path, flags, 0o600)
    mode = Path(path).parent.stat().st_mode & 0o666
    if mode != 0o600 and not os.fstat(number).st_size:
        os.fchmod(number, mode | 0o600)
    return number


def _copy_beginning(path: Path, size: int, target: IO[bytes]) -> None:
    """Copy the first bytes of a file in pieces."""
    if not size:
        return
    with path.open("rb", buffering=0) as source:
        while size:
            piece = source.read(min(size, _PIECE))
            if not piece:
                raise OSError(f"{path.name} is shorter than it was")
            target.write(piece)
            size -= len(piece)


def claim(path: Path, content: bytes) -> None:
    """Create a file with its content: of several jobs at once, one succeeds."""
    with staged(path, content) as hidden:
        try:
            path.hardlink_to(hidden)
        except FileExistsError:
            if not path.samefile(hidden):  # the same file: the server's first answer was lost
                raise RunTakenError(_not_empty(path.parent)) from None
        except OSError:  # the file system has no links
            _claim_without_links(path, hidden)


def _claim_without_links(path: Path, hidden: Path) -> None:
    try:
        path.open("xb").close()
    except FileExistsError:
        raise RunTakenError(_not_empty(path.parent)) from None
    hidden.replace(path)


def append(path: Path, data: bytes) -> None:
    """Append lines to a file, through to the disk, in place of an incomplete one at its end."""
    try:
        with open(path, "ab+", buffering=0, opener=_create) as file:
            size = file.tell()
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                size = os.pread(file.fileno(), size, 0).rfind(b"\n") + 1
                file.truncate(size)
            try:
                if file.write(data) != len(data):
                    raise OSError("not all bytes were written")
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise
    except OSError as error:
        raise write_error(path, error) from error

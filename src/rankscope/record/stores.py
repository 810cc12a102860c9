"""Run directories in object stores (S3, GCS, Azure, HDFS, any of fsspec's): a copy on this machine.

A run is written on the machine of rank 0 as any other, and its files are sent to the store by a
thread of the agent (:class:`Mirror`): a store that is slow or fails delays nobody. Readers bring
the files to a copy on their machine first (:meth:`Store.bring`).

The training's process imports no client of a store: :func:`begin_copy` looks there in a process
of its own. Run as a module, this brings what a continued run needs.
"""

import contextlib
import hashlib
import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from rankscope.core.pace import PACE
from rankscope.errors import RunError, UsageError
from rankscope.record.begin import INFO_FILE
from rankscope.record.files import cache_root, parse, read_file
from rankscope.record.lock import writer_is_gone

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

_log = logging.getLogger("rankscope")

_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/+(?P<rest>[^/].*)")
_INTERVAL = PACE.sent_seconds  # seconds from one look for changed files to the next
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # from a failure to the next try
_LOOK_SECONDS = 15.0  # that a training waits at most for what an earlier run left in the store
_LAST_PARTS = 2  # of each table, which hold the steps after the detectors' last state
_UNSENT = ".unsent"  # in a copy that was written here, until all of it is in the store
_KEPT_SECONDS = 7 * 86400.0  # that a copy stays after it was used last
_LAST_FILES = ("steps", "findings.jsonl", INFO_FILE)  # so that readers find what these name
_PIECE = 2**20


@dataclass(frozen=True, slots=True)
class Store:
    """A directory in an object store.

    Attributes:
        address: Such as ``s3://bucket/runs/sft``.
        query: What follows it after ``?``: options of PyArrow's file system.
    """

    address: str
    query: str = ""

    @classmethod
    def of(cls, path: str | Path) -> "Store | None":
        """Return the store that a path names; None for one of this machine.

        Raises:
            UsageError: It holds a password, which would be shown and recorded.
        """
        found = _ADDRESS.fullmatch(str(path))
        if found is None:
            return None
        rest, _, query = found["rest"].partition("?")
        if "@" in rest.split("/")[0] and found["scheme"].startswith(("s3", "g")):
            raise UsageError(
                f"{found['scheme']}://… expected an address without credentials; give them by the "
                "environment, such as AWS_ACCESS_KEY_ID"
            )
        root = "/" if found["scheme"] == "file" else ""  # no host
        return cls(f"{found['scheme']}://{root}{rest.rstrip('/')}", query)

    def __str__(self) -> str:
        return f"{self.address}?{self.query}" if self.query else self.address

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.address.rpartition("/")[2]

    @property
    def copy(self) -> Path:
        """Where its copy lies on this machine."""
        above = hashlib.sha256(str(self.sibling("")).encode()).hexdigest()[:16]
        return copies_folder() / above / self.name

    def sibling(self, name: str) -> "Store":
        """Return another directory beside it."""
        return Store(f"{self.address.rpartition('/')[0]}/{name}", self.query)

    def open(self) -> "tuple[FileSystem, str]":
        """Return the file system, and the directory's path in it.

        Raises:
            RunError: It cannot be reached, or nothing is installed that can.
        """
        import pyarrow as pa
        from pyarrow.fs import FileSystem

        opened: tuple[FileSystem, str]
        try:
            opened = FileSystem.from_uri(str(self))
            return opened
        except pa.ArrowInvalid as error:
            if "Unrecognized" not in str(error):
                raise self.failure(error) from error
        except (OSError, ValueError, ImportError) as error:
            raise self.failure(error) from error
        try:
            opened = FileSystem.from_uri(f"fsspec+{self}")
            return opened
        except Exception as error:
            raise self.failure(error) from error

    def failure(self, error: Exception) -> RunError:
        """Return the error to raise when the store refuses something."""
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return RunError(
            f"cannot reach {self.address} ({reason}): check the address, the credentials in the "
            "environment, and that the package for it is installed"
        )

    def bring(self, copy: Path, wanted: Callable[[str], bool] | None = None) -> int:
        """Bring changed files to a copy on this machine.

        Args:
            copy: The copy's directory.
            wanted: Says of a file's path in the directory whether it is needed; all without.

        Returns:
            How many files were brought.

        Raises:
            RunError: The store cannot be read, or the copy not be written.
        """
        files, root = self.open()
        try:
            found = {
                name: info
                for name, info in _listed(files, root).items()
                if wanted is None or wanted(name)
            }
            changed = [name for name, info in found.items() if not _is_as(copy / name, info)]
            return _bring(files, found, sorted(changed, key=_send_order), copy)
        except (OSError, ValueError) as error:
            raise self.failure(error) from error

    def names(self) -> list[str]:
        """Return the paths of the files in the directory.

        Raises:
            RunError: The store cannot be read.
        """
        files, root = self.open()
        try:
            return list(_listed(files, root))
        except (OSError, ValueError) as error:
            raise self.failure(error) from error


def copies_folder() -> Path:
    """Return where this user's copies lie.

    Raises:
        RunError: The user has no home directory, and XDG_CACHE_HOME is not set.
    """
    try:
        return cache_root() / "runs"
    except RuntimeError as error:
        raise RunError(
            f"there is no place for copies of runs in object stores ({error}): set XDG_CACHE_HOME"
        ) from error


def at_hand(path: str | Path) -> Path:
    """Return where a run can be read on this machine; one in a store is brought first.

    Raises:
        RunError: The store cannot be read.
        UsageError: The address holds a password.
    """
    store = Store.of(path)
    if store is None:
        return Path(path)
    if not (store.copy / _UNSENT).exists():  # else it is newer than what the store holds
        store.bring(store.copy)
    return store.copy


def keep_at_hand(store: Store, seconds: float = 10.0) -> None:
    """Bring what changes in a store every few seconds, from a thread, until the process ends."""

    def follow() -> None:
        while True:
            time.sleep(seconds)
            try:
                store.bring(store.copy)
            except RunError as error:
                _log.warning("%s", error)

    threading.Thread(target=follow, name="rankscope-store", daemon=True).start()


def begin_copy(store: Store) -> Store:
    """Make room for a run on this machine, beside what the store holds of earlier ones.

    Returns:
        The store, or one of another name where it cannot be told in time what the store holds:
        nothing there is overwritten.
    """
    command = [sys.executable, "-m", "rankscope.record.stores", str(store)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LOOK_SECONDS, check=False
        )
        problem = done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"cannot look into {store.address} ({type(error).__name__}: {error})"
    if not problem:
        return store
    other = store.sibling(f"{store.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    _log.warning("%s. This run does not continue an earlier one; it is %s", problem, other.address)
    return other


def _bring_previous(store: Store) -> None:
    """Bring what tells of the runs that a directory and its numbered siblings hold."""
    number, previous = 1, None
    while _is_there(one := store if number == 1 else store.sibling(f"{store.name}-{number}")):
        number, previous = number + 1, one
    if previous is None or (previous.copy / _UNSENT).exists():
        return
    parts: dict[str, list[str]] = {}
    for name in previous.names():
        parts.setdefault(name.rpartition("/")[0], []).append(name)
    needed = {name for folder in parts.values() for name in sorted(folder)[-_LAST_PARTS:]}
    previous.bring(previous.copy, {*needed, *parts.get("", ())}.__contains__)


def _is_there(store: Store) -> bool:
    """Return whether a directory holds a run, and bring what says so; remove what is no more."""
    if (store.copy / _UNSENT).exists():
        return True
    store.bring(store.copy, lambda name: name == INFO_FILE)
    if INFO_FILE in store.names():
        return True
    shutil.rmtree(store.copy, ignore_errors=True)
    return False


def _remove_old_copies() -> None:
    """Remove copies that were not used for long, and are in the store."""
    now = time.time()
    for copy in copies_folder().glob("*/*"):
        with contextlib.suppress(OSError):
            if not (copy / _UNSENT).exists() and now - copy.stat().st_atime > _KEPT_SECONDS:
                shutil.rmtree(copy)


class Mirror:
    """Sends a run's files to a store while it is written, from a thread.

    A failure is told once; what was not sent is sent later.

    Args:
        copy: The run's directory on this machine.
        store: Where it belongs.
        interval: Seconds from one look for changed files to the next.
    """

    def __init__(self, copy: Path, store: Store, interval: float = _INTERVAL) -> None:
        self._sender, self._interval = _Sender(copy, store), interval
        self._closing = threading.Event()
        self._done = threading.Event()
        with contextlib.suppress(OSError):
            (copy / _UNSENT).write_text(str(store))
        threading.Thread(target=self._run, name="rankscope-mirror", daemon=True).start()

    @property
    def address(self) -> str:
        """Where the files go."""
        return self._sender.store.address

    def close(self, seconds: float) -> bool:
        """Send what is left, in the time that is given; return whether all of it was sent.

        Sending goes on afterwards, as long as the process lives.
        """
        self._closing.set()
        return self._done.wait(seconds)

    def _run(self) -> None:
        pause, looks_back = _FIRST_PAUSE, True
        while True:
            last = self._closing.is_set()
            if self._sender.try_to_send():
                if last:
                    break
                pause, wait = _FIRST_PAUSE, self._interval
                if looks_back:
                    looks_back = False
                    _send_left_behind()
            else:
                pause, wait = min(2 * pause, _LONGEST_PAUSE), pause
            if last:
                time.sleep(wait)
            else:
                self._closing.wait(wait)
        self._sender.finish()
        self._done.set()
        if looks_back:
            _send_left_behind()


class _Sender:
    """Sends the files of a copy that have changed since the last time."""

    def __init__(self, copy: Path, store: Store) -> None:
        self.copy, self.store = copy, store
        self._sent: dict[str, tuple[int, int]] = {}
        self._failed = False
        self._opened: tuple[Any, str] | None = None

    def try_to_send(self) -> bool:
        """Return whether all went well; say so when that has changed."""
        try:
            self._send_changed()
        except Exception as error:  # of the store's client, which may raise anything
            self._opened = None
            if not self._failed:
                failure = self.store.failure(error)
                _log.warning("%s. The run is kept in %s, and sent later", failure, self.copy)
            self._failed = True
            return False
        if self._failed:
            _log.warning("%s is written again; nothing is missing", self.store.address)
        self._failed = False
        return True

    def finish(self) -> None:
        """Note that all files are in the store."""
        with contextlib.suppress(OSError):
            (self.copy / _UNSENT).unlink()

    def _send_changed(self) -> None:
        if self._opened is None:
            self._opened = self.store.open()
        files, root = self._opened
        with contextlib.ExitStack() as stack:
            # What names others is opened first and sent last: readers find all that it names.
            names = sorted(_files_in(self.copy), key=_send_order, reverse=True)
            opened = [(name, _opened(self.copy / name, stack)) for name in names]
            for name, file in reversed(opened):
                if file is None:
                    continue
                status = os.fstat(file.fileno())
                state = status.st_size, status.st_mtime_ns
                if self._sent.get(name) != state:
                    _send(files, f"{root}/{name}", file.read())
                    self._sent[name] = state


def _send_left_behind() -> None:
    """Send what earlier runs of this machine could not, if they have ended."""
    for mark in copies_folder().glob(f"*/*/{_UNSENT}"):
        with contextlib.suppress(OSError, RunError, ValueError):
            store = Store.of(mark.read_text())
            if store is not None and _has_ended(mark.parent):
                sender = _Sender(mark.parent, store)
                if sender.try_to_send():
                    sender.finish()


def _has_ended(run: Path) -> bool:
    said = parse(read_file(run / INFO_FILE))
    return said.get("status") != "running" or writer_is_gone(run)


def _files_in(folder: Path) -> Iterator[str]:
    """Yield the paths of a run's files in its directory; none that is hidden, no link."""
    for entry in os.scandir(folder):
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from (f"{entry.name}/{name}" for name in _files_in(Path(entry.path)))
        elif entry.is_file(follow_symlinks=False):
            yield entry.name


def _opened(path: Path, stack: contextlib.ExitStack) -> BinaryIO | None:
    try:
        return stack.enter_context(path.open("rb"))
    except FileNotFoundError:
        return None


def _send(files: "FileSystem", path: str, content: bytes) -> None:
    """Write a file at once: readers see the old one or the new one."""
    try:
        target = files.open_output_stream(path)
    except FileNotFoundError:  # a file system with directories
        files.create_dir(str(PurePosixPath(path).parent), recursive=True)
        target = files.open_output_stream(path)
    with target:
        target.write(content)


def _send_order(name: str) -> tuple[int, str]:
    first = name.partition("/")[0]
    return (_LAST_FILES.index(first) + 1 if first in _LAST_FILES else 0), name


def _listed(files: "FileSystem", root: str) -> "dict[str, FileInfo]":
    from pyarrow.fs import FileSelector, FileType

    listed = files.get_file_info(FileSelector(root, recursive=True, allow_not_found=True))
    named = {_inside(info.path, root): info for info in listed if info.type == FileType.File}
    named.pop("", None)
    return named


def _inside(path: str, root: str) -> str:
    """Return a file's path in the directory; empty for one that does not belong to a run."""
    name = path.removeprefix("/").removeprefix(f"{root.removeprefix('/')}/")
    parts = PurePosixPath(name).parts
    safe = parts and not any(part.startswith(".") or part == "/" for part in parts)
    return str(PurePosixPath(name)) if safe and name != path.removeprefix("/") else ""


def _is_as(path: Path, info: "FileInfo") -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_size == info.size and status.st_mtime_ns == (info.mtime_ns or 0)


def _bring(
    files: "FileSystem", found: "dict[str, FileInfo]", changed: list[str], copy: Path
) -> int:
    """Bring files, what names others first, and show them in the order in which they were sent."""
    hidden: dict[str, Path] = {}
    try:
        for name in reversed(changed):
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            hidden[name] = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
            source = files.open_input_stream(found[name].path)
            with source, hidden[name].open("xb") as file:
                shutil.copyfileobj(source, file, _PIECE)
            time_ns = found[name].mtime_ns or 0
            os.utime(hidden[name], ns=(time_ns, time_ns))
        for name in changed:
            hidden.pop(name).replace(copy / name)
    finally:
        for path in hidden.values():
            path.unlink(missing_ok=True)
    return len(changed)


def _main() -> None:
    store = Store.of(sys.argv[1])
    assert store is not None
    try:
        _bring_previous(store)
        _remove_old_copies()
    except (RunError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main()

"""Run directories in object stores (S3, GCS, Azure, HDFS, any of fsspec's): a copy on this machine.

A run is written on the machine of rank 0 as any other, and its files are sent to the store by a
thread of the agent (:class:`Mirror`): a slow or failing store delays no rank. Readers first bring
the files to a copy on their machine (:meth:`Store.bring`).

The training's process imports no client of a store: :func:`begin_copy` looks there in a process
of its own. Run as a module, this brings what a continued run needs.
"""

import contextlib
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rankscope.bus.pace import PACE
from rankscope.errors import RunError, UsageError
from rankscope.files import cache_root, make_folder
from rankscope.record.begin import INFO_FILE

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

_log = logging.getLogger("rankscope")

_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/+(?P<rest>[^/].*)")
_INTERVAL = PACE.sent_seconds  # seconds from one look for changed files to the next
_LOOK_SECONDS = 15.0  # that a training waits at most for an earlier run's files in the store
_FOLLOW_SECONDS = 10.0  # between two looks of a reader for changed files
_LAST_PARTS = 2  # of each table, which hold the steps after the detectors' last state
_UNSENT = ".unsent"  # in a copy that was written here, until all of it is in the store
_KEPT_SECONDS = 7 * 86400.0  # that a copy stays after its last use
_LAST_FILES = ("steps", "findings.jsonl", INFO_FILE)  # that name others, which are sent before


@dataclass(frozen=True, slots=True)
class Store:
    """A directory in an object store."""

    address: str  # such as ``s3://bucket/runs/sft``
    query: str = ""  # the part after ``?``: options of PyArrow's file system

    @classmethod
    def of(cls, path: str | Path) -> "Store | None":
        """Return the store of a path; None for a path on this machine."""
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
        """The directory of its copy on this machine."""
        above = hashlib.sha256(str(self.sibling("")).encode()).hexdigest()[:16]
        return copies_folder() / above / self.name

    def sibling(self, name: str) -> "Store":
        """Return another directory beside it."""
        return Store(f"{self.address.rpartition('/')[0]}/{name}", self.query)

    def open(self) -> "tuple[FileSystem, str]":
        """Return the file system, and the directory's path in it."""
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
        """Return the error to raise when the store fails."""
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return RunError(
            f"cannot reach {self.address} ({reason}): check the address, the credentials in the "
            "environment, and that the package for it is installed"
        )

    def bring(self, copy: Path, wanted: Callable[[str], bool] | None = None) -> int:
        """Bring changed files that are ``wanted``, by their paths, to a copy; return how many."""
        files, root = self.open()
        try:
            found = {
                name: info
                for name, info in _listed(files, root).items()
                if (wanted is None or wanted(name)) and not _is_as(copy / name, info)
            }
            _bring(files, found, copy)
        except (OSError, ValueError) as error:
            raise self.failure(error) from error
        return len(found)

    def names(self) -> list[str]:
        """Return the paths of the files in the directory."""
        files, root = self.open()
        try:
            return list(_listed(files, root))
        except (OSError, ValueError) as error:
            raise self.failure(error) from error


def copies_folder() -> Path:
    """Return the directory of this user's copies."""
    try:
        return cache_root() / "runs"
    except RuntimeError as error:
        raise RunError(
            f"there is no place for copies of runs in object stores ({error}): set XDG_CACHE_HOME"
        ) from error


def at_hand(path: str | Path) -> Path:
    """Return a run's directory on this machine; one in a store is brought first."""
    store = Store.of(path)
    if store is None:
        return Path(path)
    if not (store.copy / _UNSENT).exists():  # else the copy is newer than the store
        store.bring(store.copy)
    return store.copy


def keep_at_hand(store: Store) -> None:
    """Bring changed files from a store every few seconds, in a thread, until the process ends."""

    def follow() -> None:
        while True:
            time.sleep(_FOLLOW_SECONDS)
            try:
                store.bring(store.copy)
            except RunError as error:
                _log.warning("%s", error)

    threading.Thread(target=follow, name="rankscope-store", daemon=True).start()


def begin_copy(store: Store) -> Store:
    """Prepare the copy of a run on this machine, with the needed files of earlier runs.

    Returns the store, or one of another name if its content is not known in time: no file there is
    overwritten.
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
    """Bring the needed files of earlier runs in a directory and its numbered siblings."""
    number = 1
    previous = None
    while _is_there(one := store if number == 1 else store.sibling(f"{store.name}-{number}")):
        number += 1
        previous = one
    if previous is None or (previous.copy / _UNSENT).exists():
        return
    parts: dict[str, list[str]] = {}
    for name in previous.names():
        parts.setdefault(name.rpartition("/")[0], []).append(name)
    needed = {name for folder in parts.values() for name in sorted(folder)[-_LAST_PARTS:]}
    previous.bring(previous.copy, {*needed, *parts.get("", ())}.__contains__)


def _is_there(store: Store) -> bool:
    """Return whether a directory holds a run; bring its ``run.json``, or remove an old copy."""
    if (store.copy / _UNSENT).exists():
        return True
    store.bring(store.copy, lambda name: name == INFO_FILE)
    if INFO_FILE in store.names():
        return True
    shutil.rmtree(store.copy, ignore_errors=True)
    return False


def _remove_old_copies() -> None:
    """Remove copies that are in the store and were not used for long."""
    now = time.time()
    for copy in copies_folder().glob("*/*"):
        with contextlib.suppress(OSError):
            if not (copy / _UNSENT).exists() and now - copy.stat().st_atime > _KEPT_SECONDS:
                shutil.rmtree(copy)


class Mirror:
    """Sends a run's files to a store while it is written, from a thread.

    A failure is logged once; unsent files are tried again with the next look for changed files.
    """

    def __init__(self, copy: Path, store: Store, interval: float = _INTERVAL) -> None:
        self._copy = copy
        self._store = store
        self.address = store.address
        self._interval = interval
        self._sent: dict[str, tuple[int, int]] = {}
        self._failed = False
        self._closing = threading.Event()
        with contextlib.suppress(OSError):
            (copy / _UNSENT).touch()
        self._thread = threading.Thread(target=self._run, name="rankscope-mirror", daemon=True)
        self._thread.start()

    def close(self, seconds: float) -> bool:
        """Wait up to so long until all files are sent; return whether they are. Sending goes on."""
        self._closing.set()
        self._thread.join(seconds)
        return not self._thread.is_alive() and not self._failed

    def _run(self) -> None:
        while not self._closing.is_set():
            self._send()
            self._closing.wait(self._interval)
        self._send()
        if not self._failed:
            with contextlib.suppress(OSError):
                (self._copy / _UNSENT).unlink()

    def _send(self) -> None:
        try:
            self._send_changed()
        except Exception as error:  # the store's client may raise anything
            if not self._failed:
                failure = self._store.failure(error)
                _log.warning("%s. The run is kept in %s", failure, self._copy)
            self._failed = True
            return
        if self._failed:
            _log.warning("%s is written again; nothing is missing", self.address)
        self._failed = False

    def _send_changed(self) -> None:
        files, root = self._store.open()
        paths = {path.relative_to(self._copy).as_posix(): path for path in self._copy.glob("**/*")}
        for name in sorted(paths, key=_send_order):
            path = paths[name]
            if name.startswith(".") or "/." in name or not path.is_file():
                continue
            with contextlib.suppress(FileNotFoundError):  # another one has replaced it
                state = path.stat().st_size, path.stat().st_mtime_ns
                if self._sent.get(name) != state:
                    _copy_out(path, files, f"{root}/{name}")
                    self._sent[name] = state


def _copy_out(path: Path, files: "FileSystem", target: str) -> None:
    from pyarrow.fs import LocalFileSystem, copy_files

    file_systems = {"source_filesystem": LocalFileSystem(), "destination_filesystem": files}
    try:
        copy_files(str(path), target, **file_systems)
    except FileNotFoundError:
        path.stat()  # it exists: this is a file system with directories
        files.create_dir(str(PurePosixPath(target).parent), recursive=True)
        copy_files(str(path), target, **file_systems)


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
    """Return a file's path in the directory; empty if it does not belong to a run."""
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


def _bring(files: "FileSystem", found: "dict[str, FileInfo]", copy: Path) -> None:
    """Bring files, those that name others first, and publish them in the order of sending."""
    from pyarrow.fs import LocalFileSystem, copy_files

    if not found:
        return
    make_folder(copy, 0o700)
    names = sorted(found, key=_send_order)
    with TemporaryDirectory(prefix=".", dir=copy) as hidden:
        for name in reversed(names):
            path = Path(hidden, name)
            time_ns = found[name].mtime_ns or 0
            path.parent.mkdir(parents=True, exist_ok=True)
            copy_files(
                found[name].path,
                str(path),
                source_filesystem=files,
                destination_filesystem=LocalFileSystem(),
            )
            os.utime(path, ns=(time_ns, time_ns))
        for name in names:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            Path(hidden, name).replace(copy / name)


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

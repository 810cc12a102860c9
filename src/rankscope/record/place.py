"""Where a directory is that may be moved while a run is written into it."""

import contextlib
import os
from pathlib import Path

from rankscope.errors import RunError
from rankscope.files import is_file
from rankscope.record.begin import INFO_FILE


class DirectoryPlace:
    """Follows a run's directory by an open descriptor; where there is no ``/proc``, it stays."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = _opened(path)

    def now(self) -> Path:
        """Return the directory's present path; RunError if it is gone and another run is there."""
        if self._descriptor is None:
            return self._path
        own = os.fstat(self._descriptor)
        if _is(self._path, own):
            return self._path
        with contextlib.suppress(OSError):
            moved = Path(f"/proc/self/fd/{self._descriptor}").readlink()
            if _is(moved, own):
                self._path = moved
                return moved
        if is_file(self._path / INFO_FILE):
            raise RunError(f"{self._path} holds another run now, and this run's directory is gone")
        if self._path.is_dir():  # it was made again
            self.close()
            self._descriptor = _opened(self._path)
        return self._path

    def close(self) -> None:
        """Stop following."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _opened(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError:
        return None


def _is(path: Path, own: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), own)
    except OSError:
        return False

"""Compiles the native kernels on first use, with the system's C compiler, into the user's cache."""

import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_FOLDER = Path(__file__).parent
_SOURCES = tuple(_FOLDER / name for name in ("sketch.c", "digest.c", "dot.c", "inputs.c"))
_HEADERS = (_FOLDER / "vectors.h",)
_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-w")
_TUNING = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler knows
_PATIENCE = 20.0  # seconds, for other ranks that compile and for the compiler itself
_POLL = 0.05


_log = logging.getLogger("rankscope")


class BuildError(Exception):
    """The native kernels cannot be built here; the message says why."""


class UnsafeCacheError(BuildError):
    """Somebody else might have put code into the cache."""


def tell_plain(what: str, error: Exception, level: int = logging.DEBUG) -> None:
    """Log that plain torch does something, since what is faster has failed; training goes on."""
    reason = str(error).strip().split("\n")[0]
    _log.log(level, "%s in plain torch: %s", what, reason)


class Launching:
    """Whether a kernel is not known to fail; else plain torch does its work for good.

    Args:
        what: What it does, in the words of :func:`tell_plain`.
    """

    def __init__(self, what: str) -> None:
        self.possible = True
        self._what = what

    def give_up(self, error: Exception) -> None:
        """Take notice that it has failed, whatever it is: training goes on, a little slower."""
        self.possible = False
        tell_plain(self._what, error, logging.INFO)


def built_library(sources: Sequence[Path] = _SOURCES, headers: Sequence[Path] = _HEADERS) -> Path:
    """Return compiled kernels; compile them if no process of this user has done so yet.

    Args:
        sources: Files of C that make one library; by default the kernels of this package.
        headers: Files that they include.

    Returns:
        A shared library in the cache directory, named after source, compiler and processor, and
        after its own content, which is checked.

    Raises:
        UnsafeCacheError: The cache directory is not this user's alone.
        BuildError: There is no compiler, it failed, or building took too long.
    """
    compiler, folder = _compiler(), _cache_folder()
    deadline = time.monotonic() + _PATIENCE
    try:
        name = f"kernels-{_key(compiler, (*sources, *headers))}"
        _make_private(folder)
        library = _whole_library(folder, name)
        if library is None:
            with _locked(folder / f"{name}.lock", deadline):
                library = _whole_library(folder, name, remove=True) or _compile(
                    compiler, sources, folder / name, deadline
                )
    except OSError as error:
        raise BuildError(f"the kernels cannot be built in {folder}: {error}") from error
    return library


def _compiler() -> list[str]:
    try:
        words = shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError as error:
        raise BuildError(f"CC cannot be read: {error}") from error
    found = shutil.which(words[0])
    if found is None:
        raise BuildError(f"there is no C compiler {words[0]!r}")
    return [found, *words[1:]]


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "rankscope" / "kernels"
    except RuntimeError as error:  # no home directory
        raise BuildError(str(error)) from error


def _make_private(folder: Path) -> None:
    """Create the cache directory; refuse one to which another user could add code.

    Its parent, which other parts of the cache share, must not be another user's.

    Raises:
        UnsafeCacheError: It is not this user's alone.
    """
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for place, allowed in ((folder.parent, (os.getuid(), 0)), (folder, (os.getuid(),))):
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o700)
        status = place.lstat()
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & stat.S_IWOTH
        if place is folder:
            private = private and not status.st_mode & stat.S_IWGRP
        if not private or status.st_uid not in allowed:
            raise UnsafeCacheError(
                f"expected a directory that only user {os.getuid()} can write in {place}, got mode "
                f"{stat.filemode(status.st_mode)} of user {status.st_uid}; remove it, or set "
                "XDG_CACHE_HOME to a directory of your own"
            )


def _whole_library(folder: Path, name: str, *, remove: bool = False) -> Path | None:
    """Return the library whose content is what its name says; on request, remove broken ones."""
    for library in folder.glob(f"{name}-*.so"):
        status = library.lstat()
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
        private = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if ours and private and library.name == _sealed_name(name, library):
            return library
        if remove:
            library.unlink()
    return None


def _sealed_name(name: str, file: Path) -> str:
    content = hashlib.blake2b(file.read_bytes(), digest_size=16)
    return f"{name}-{content.hexdigest()}.so"


def _key(compiler: list[str], files: Sequence[Path]) -> str:
    status = Path(compiler[0]).resolve().stat()
    digest = hashlib.blake2b(digest_size=12)
    for part in (*compiler, status.st_size, status.st_mtime_ns, *_FLAGS, _processor()):
        digest.update(f"{part}\n".encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    """Describe the processor well enough to know whether it runs what was tuned for another."""
    described = f"{platform.system()} {platform.machine()} {platform.processor()}"
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        for line in lines:
            if not line.strip():
                break  # one processor is enough
            if line.startswith(("model name", "flags", "Features", "CPU part")):
                described += line
    return described


@contextlib.contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    """Hold a lock between processes, so that of many ranks one compiles and the others wait."""
    import fcntl

    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError("another process has been building for too long") from None
                time.sleep(_POLL)
        yield  # closing the file releases the lock


def _compile(compiler: list[str], sources: Sequence[Path], place: Path, deadline: float) -> Path:
    """Return a new library, which is on the disk as a whole before it has its name."""
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        output = Path(folder) / "library.so"
        said = ""
        for tuning in _TUNING:
            command = [*compiler, *_FLAGS, *tuning, "-o", str(output), *map(str, sources)]
            code, error = _run(command, Path(folder) / "said", deadline)
            if code == 0 and output.exists():
                output.chmod(0o700)
                with output.open("rb") as file:
                    os.fsync(file.fileno())
                return output.replace(place.with_name(_sealed_name(place.name, output)))
            said = said or error.strip()
    raise BuildError(f"{compiler[0]} failed: {said[-500:]}")


def _run(command: list[str], log: Path, deadline: float) -> tuple[int, str]:
    """Run a compiler, with its children no longer than allowed; return its code and errors."""
    with log.open("wb") as file:  # a pipe would be waited for as long as any child holds it
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            process_group=0,
        )
        try:
            code = process.wait(max(1.0, deadline - time.monotonic()))
        except BaseException as error:  # Ctrl-C, too
            if process.returncode is None:  # its number is still its own
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise BuildError("the compiler takes too long") from error
            raise
    return code, log.read_text(errors="replace")

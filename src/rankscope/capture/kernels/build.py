"""Compiles the native kernels on first use, with the system's C compiler, into the user's cache."""

import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
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


def tell_plain(what: str, error: Exception, level: int = logging.DEBUG) -> None:
    """Log that plain torch does something, since what is faster has failed; training goes on."""
    reason = str(error).strip().split("\n")[0]
    _log.log(level, "%s in plain torch: %s", what, reason)


def built_library(sources: Sequence[Path] = _SOURCES, headers: Sequence[Path] = _HEADERS) -> Path:
    """Return compiled kernels; compile them if no process of this user has done so yet.

    Args:
        sources: Files of C that make one library; by default the kernels of this package.
        headers: Files that they include.

    Returns:
        A shared library in the cache directory, named after source, compiler and processor.

    Raises:
        BuildError: There is no compiler, it failed, or building took too long.
    """
    compiler, folder = _compiler(), _cache_folder()
    deadline = time.monotonic() + _PATIENCE
    try:
        library = folder / f"kernels-{_key(compiler, (*sources, *headers))}.so"
        if library.exists():
            return library
        library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(library.with_suffix(".lock"), deadline):
            if not library.exists():
                _compile(compiler, sources, library, deadline)
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

    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError("another process has been building for too long") from None
                time.sleep(_POLL)
        yield  # closing the file releases the lock


def _compile(compiler: list[str], sources: Sequence[Path], library: Path, deadline: float) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        output = Path(folder) / library.name
        said = ""
        for tuning in _TUNING:
            command = [*compiler, *_FLAGS, *tuning, "-o", str(output), *map(str, sources)]
            try:
                done = subprocess.run(
                    command,
                    check=False,
                    capture_output=True,
                    text=True,
                    stdin=subprocess.DEVNULL,
                    timeout=max(1.0, deadline - time.monotonic()),
                )
            except subprocess.TimeoutExpired as error:
                raise BuildError("the compiler takes too long") from error
            if done.returncode == 0 and output.exists():
                output.replace(library)
                return
            said = said or done.stderr.strip()
    raise BuildError(f"{compiler[0]} failed: {said[-500:]}")

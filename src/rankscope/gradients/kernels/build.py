"""Compiles the kernels in C, beside their sources: one library for each level of vectors.

The package's build runs this file (``hatch_build.py``), and so does ``python build.py`` after an
edit of a source: it needs the standard library alone. The libraries need no Python headers, and fit
every version of Python.
"""

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent

_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-w")
LEVELS: dict[str, tuple[str, ...]] = {"default": ()}
if platform.machine() in ("x86_64", "AMD64"):
    # The oldest processors of each level, whose names old compilers accept, too.
    LEVELS["avx2"] = ("-march=haswell", "-mtune=generic")
    LEVELS["avx512"] = ("-march=skylake-avx512", "-mtune=generic")


def hash_sources() -> str | None:
    """Return a hash of all sources in C; None where they are not installed."""
    files = sorted(FOLDER.glob("*.[ch]"))
    if not files:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.name}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def compile_kernels() -> None:
    """Compile all libraries anew; if one fails, those that are there stay."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    sources = sorted(map(str, FOLDER.glob("*.c")))
    command = [*compiler, *_FLAGS, f'-DRANKSCOPE_SOURCES="{hash_sources()}"', *sources]
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        libraries = {level: Path(folder, f"kernels-{level}.so") for level in LEVELS}
        for level, library in libraries.items():
            subprocess.run([*command, *LEVELS[level], "-o", str(library)], check=True)
        for library in libraries.values():
            library.replace(FOLDER / library.name)


if __name__ == "__main__":
    try:
        compile_kernels()
    except (OSError, ValueError, subprocess.CalledProcessError) as failed:
        sys.exit(f"the kernels cannot be compiled: {failed}")

"""Compiles the kernels in C when the package is built or installed, if there is a C compiler.

There is one library for each level of vector instructions; the package picks one when it is used
(``capture/kernels/library.py``). They need no Python headers, and fit every version of Python.

Run ``python hatch_build.py`` to compile them in this source tree.
"""

import os
import platform
import runpy
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

KERNELS = Path(__file__).parent / "src" / "rankscope" / "capture" / "kernels"
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-w")
LEVELS: dict[str, tuple[str, ...]] = {"default": ()}
if platform.machine() in ("x86_64", "AMD64"):
    # The oldest processors of each level, whose names old compilers know, too.
    LEVELS["avx2"] = ("-march=haswell", "-mtune=generic")
    LEVELS["avx512"] = ("-march=skylake-avx512", "-mtune=generic")


class KernelsHook(BuildHookInterface[Any]):
    """Adds the libraries to the wheel, and its platform to its name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; without a compiler that works, the wheel is one for all platforms."""
        try:
            compile_kernels()
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"rankscope is built without compiled kernels: {error}")
            return
        build_data["artifacts"].append(f"{KERNELS.relative_to(self.root)}/*.so")
        build_data["pure_python"] = False
        # What manylinux stands for has to be checked first, which is left to auditwheel.
        tags = (tag.platform for tag in sys_tags())
        here = next(tag for tag in tags if "manylinux" not in tag and "musllinux" not in tag)
        build_data["tag"] = f"py3-none-{here}"


def compile_kernels() -> None:
    """Compile all libraries anew, into the package's folder.

    Raises:
        OSError: There is no compiler, or no place for the libraries.
        ValueError: ``CC`` cannot be read.
        subprocess.CalledProcessError: The compiler fails.
    """
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    sources = sorted(map(str, KERNELS.glob("*.c")))
    stamp = runpy.run_path(str(KERNELS / "sources.py"))["hash_sources"]()
    command = [*compiler, *FLAGS, f'-DRANKSCOPE_SOURCES="{stamp}"', *sources]
    with tempfile.TemporaryDirectory(dir=KERNELS) as folder:
        libraries = {level: Path(folder, f"kernels-{level}.so") for level in LEVELS}
        for level, library in libraries.items():
            subprocess.run([*command, *LEVELS[level], "-o", str(library)], check=True)
        for library in libraries.values():
            library.replace(KERNELS / library.name)


if __name__ == "__main__":
    try:
        compile_kernels()
    except (OSError, ValueError, subprocess.CalledProcessError) as failed:
        sys.exit(f"there are no compiled kernels: {failed}")

"""Adds the kernels in C to the package when it is built or installed, if there is a C compiler."""

import runpy
import subprocess
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

KERNELS = "src/rankscope/gradients/kernels"


class KernelsHook(BuildHookInterface[Any]):
    """Compiles them, and adds the platform to the wheel's name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; without a compiler that works, the wheel is one for all platforms."""
        try:
            runpy.run_path(f"{self.root}/{KERNELS}/build.py")["compile_kernels"]()
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"rankscope is built without compiled kernels: {error}")
            return
        build_data["artifacts"].append(f"{KERNELS}/*.so")
        build_data["pure_python"] = False
        # What manylinux stands for has to be checked first, which is left to auditwheel.
        tags = (tag.platform for tag in sys_tags())
        here = next(tag for tag in tags if "manylinux" not in tag and "musllinux" not in tag)
        build_data["tag"] = f"py3-none-{here}"

"""Python stacks of stuck processes, taken from outside by py-spy.

py-spy only reads memory here (``--nonblocking``): it neither stops the process nor interrupts its
system call, and it can read a stopped process.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rankscope.agent.flight_recorder import Reader
from rankscope.agent.hang_report import Stack
from rankscope.errors import install_command

NUM_FRAMES = 12

NO_PERMISSION = (
    "the system does not let the agent read this process; set kernel.yama.ptrace_scope to 0 or 1, "
    "or give a container CAP_SYS_PTRACE (docker run --cap-add SYS_PTRACE)"
)


def stacks_of(threads: Mapping[int, int], seconds: float = 5.0) -> dict[int, Stack]:
    """Return the Python stack of the training thread of each process; blocks meanwhile.

    Args:
        threads: The training thread's number (``threading.get_native_id()``) by process; 0 stands
            for the main thread.
        seconds: How long one process may take.

    Returns:
        A stack for each process; without one, its ``missing`` is the reason.
    """
    program = _find()
    if program is None:
        why = "py-spy, which shows Python stacks of hangs, is not installed where the agent runs"
        return {pid: _missing(f"{why}: {install_command('hangs')}") for pid in threads}
    return {pid: _stack_of(program, pid, thread, seconds) for pid, thread in threads.items()}


class StackTaker:
    """Runs :func:`stacks_of` in a thread of its own; arguments are as there.

    Args:
        threads: The training threads by process.
        collectives: Where collectives of processes are read.
        seconds: How long one stack may take, and all collectives together.
    """

    def __init__(
        self,
        threads: Mapping[int, int],
        collectives: Mapping[int, Reader] = MappingProxyType({}),
        seconds: float = 5.0,
    ) -> None:
        self._stacks: dict[int, Stack] | None = None
        self._threads = dict(threads)
        self._collectives = dict(collectives)
        self._seconds = seconds
        worker = threading.Thread(target=self._take, name="rankscope-stacks", daemon=True)
        try:
            worker.start()
        except RuntimeError as error:  # no thread can be started
            self._fail(str(error))

    def result(self) -> dict[int, Stack] | None:
        """Return the stacks by process; None until they are there."""
        return self._stacks

    def _take(self) -> None:
        try:
            for reader in self._collectives.values():
                reader.request()
            until = time.monotonic() + self._seconds
            known = {pid: reader.read(until) for pid, reader in self._collectives.items()}
            stacks = stacks_of(self._threads, self._seconds)
            for pid, collectives in known.items():
                stacks[pid]["collectives"] = collectives
            self._stacks = stacks
        except Exception as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        self._stacks = {pid: _missing(reason) for pid in self._threads}


def _find() -> str | None:
    """Return the path of py-spy: beside this Python, or on PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def _stack_of(program: str, pid: int, thread: int, seconds: float) -> Stack:
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _missing(f"py-spy did not answer within {seconds:g} s")
    except OSError as error:
        return _missing(f"py-spy cannot be started: {error}")
    if done.returncode:
        return _missing(_reason(done.stderr))
    try:
        return _chosen(json.loads(done.stdout), pid, thread)
    except (ValueError, LookupError, TypeError):
        return _missing("py-spy's answer cannot be read; rankscope knows version 0.4")


def _chosen(dumped: list[dict[str, Any]], pid: int, thread: int) -> Stack:
    """Return the stack of the training thread, else of the main thread."""
    by_number = {one["os_thread_id"]: one for one in dumped}
    main = next((one for one in dumped if one["thread_name"] == "MainThread"), dumped[0])
    one = by_number.get(thread) or by_number.get(pid) or main
    frames = [
        f"{frame['name']} ({frame['short_filename'] or frame['filename']}:{frame['line']})"
        for frame in one["frames"][:NUM_FRAMES]
    ]
    if not frames:
        return _missing("its thread runs no Python code")
    return Stack(thread=one["thread_name"] or "", frames=frames, missing="")


def _reason(words: str) -> str:
    """Return why py-spy failed, from its error output."""
    if "permission" in words.lower() or "not permitted" in words.lower():
        return NO_PERMISSION
    lines = [line.strip() for line in words.partition("Stack backtrace")[0].splitlines()]
    text = "; ".join(line for line in lines if line and line != "Caused by:")
    return f"py-spy: {text[:300] or 'failed without a word'}"


def _missing(reason: str) -> Stack:
    return Stack(thread="", frames=[], missing=reason)

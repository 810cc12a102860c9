"""The processes of a job's ranks: their states, places and Python stacks.

py-spy only reads memory here (``--nonblocking``): it neither stops the process nor interrupts its
system call, and it can read a stopped process.
"""

import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rankscope.agent.frames import ALL_RANKS, FrameKind, pack
from rankscope.agent.hang_report import CodePlace, ProcessState, Reader, Stack
from rankscope.agent.processes import ProcessWatch, open_mark, read_mark
from rankscope.bus.words import printable
from rankscope.errors import install_command

if TYPE_CHECKING:
    from rankscope.agent.hosts import RemoteHosts


NUM_FRAMES = 12

NO_PERMISSION = (
    "the system does not let the agent read this process; set kernel.yama.ptrace_scope to 0 or 1, "
    "or give a container CAP_SYS_PTRACE (docker run --cap-add SYS_PTRACE)"
)


def stacks_of(threads: Mapping[int, int], seconds: float = 5.0) -> dict[int, Stack]:
    """Return the Python stack of the training thread of each process; blocks meanwhile.

    ``threads`` has the training thread's ``threading.get_native_id()`` by process, 0 for the main
    thread. Without a stack, its ``missing`` is the reason.
    """
    program = _find()
    if program is None:
        why = "py-spy, which shows Python stacks of hangs, is not installed where the agent runs"
        return {pid: _missing(f"{why}: {install_command('hangs')}") for pid in threads}
    return {pid: _stack_of(program, pid, thread, seconds) for pid, thread in threads.items()}


class StackTaker:
    """Runs :func:`stacks_of` in a thread of its own; one stack may take so many ``seconds``."""

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


_log = logging.getLogger("rankscope")


@dataclass(slots=True)
class _Rank:
    watch: ProcessWatch
    mark: int | None
    thread: int
    collectives: Reader | None


class RankProcesses:
    """States, places and stacks of the ranks that have connected to this agent."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._taker: StackTaker | None = None
        self.remote: RemoteHosts | None = None
        self.endings: dict[int, str] = {}

    def introduce(self, rank: int, hello: Mapping[str, Any], connection: socket.socket) -> None:
        """Add the process at the other end of a connection."""
        try:
            watch = ProcessWatch.of_peer(connection)
        except OSError:  # the system cannot identify it
            return
        self._forget(rank)
        mark = open_mark(watch.pid, int(hello["progress"])) if "progress" in hello else None
        reader = None
        if "collectives" in hello:
            with contextlib.suppress(OSError):
                reader = Reader(watch.pid, hello["collectives"])
        self._ranks[rank] = _Rank(watch, mark, int(hello.get("thread", 0)), reader)

    def lives(self, rank: int) -> bool | None:
        """Return whether a rank's process runs; None if unknown."""
        known = self._ranks.get(rank)
        if known is None or known.watch.pid == os.getpid():
            return None
        state = known.watch.state()
        return None if state is ProcessState.UNKNOWN else state is not ProcessState.ENDED

    def ending(self, rank: int) -> str:
        """Return how a rank ended whose connection was lost, as far as known."""
        if rank in self.endings:
            return self.endings[rank]
        known = self._ranks.get(rank)
        if known is None or self.lives(rank) is None:
            return "its connection ended"
        if self.lives(rank):
            return "its connection was lost, though its process lives"
        how = known.watch.ending()
        return f"its process ended ({how})" if how else "its process ended"

    def request_states(self) -> None:
        """Request the states of processes on other hosts."""
        if self.remote is not None:
            self.remote.send(ALL_RANKS, pack(FrameKind.LOOK))

    def states(self) -> dict[int, ProcessState]:
        """Return the known states of processes, by rank."""
        others = {} if self.remote is None else self.remote.states
        own = {rank: known.watch.state() for rank, known in dict(self._ranks).items()}
        return {**others, **own}

    def marks(self) -> dict[int, CodePlace]:
        """Return the known places of ranks inside their steps."""
        places = {} if self.remote is None else dict(self.remote.places)
        for rank, known in dict(self._ranks).items():
            place = None if known.mark is None else read_mark(known.mark)
            if place is not None:
                places[rank] = place
        return places

    def write_line(self, line: str) -> None:
        """Write a line to the error stream of the lowest rank, even while it hangs."""
        for rank in sorted(dict(self._ranks)):
            pid = self._ranks[rank].watch.pid
            if pid == os.getpid():
                _log.warning("%s", line)
                return
            with contextlib.suppress(OSError):
                flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
                descriptor = os.open(f"/proc/{pid}/fd/2", flags)
                try:
                    os.write(descriptor, f"rankscope: {printable(line)}\n".encode())
                finally:
                    os.close(descriptor)
                return

    def take_stacks(self) -> None:
        """Start taking the Python stacks and collectives of all live ranks."""
        if self._taker is None:
            ranks = dict(self._ranks).values()
            alive = [one for one in ranks if one.watch.state() is not ProcessState.ENDED]
            self._taker = StackTaker(
                {known.watch.pid: known.thread for known in alive},
                {known.watch.pid: known.collectives for known in alive if known.collectives},
            )
        if self.remote is not None:
            self.remote.send(ALL_RANKS, pack(FrameKind.STACKS))

    def stacks(self) -> dict[int, Stack] | None:
        """Return stacks by rank, once some are there."""
        found = {} if self.remote is None else self.remote.take_stacks()
        taken = None if self._taker is None else self._taker.result()
        if taken is None:
            return found or None
        self._taker = None
        ranks = {known.watch.pid: rank for rank, known in dict(self._ranks).items()}
        return {**found, **{ranks[pid]: stack for pid, stack in taken.items() if pid in ranks}}

    def close(self) -> None:
        """Close all descriptors."""
        for rank in list(self._ranks):
            self._forget(rank)

    def _forget(self, rank: int) -> None:
        known = self._ranks.pop(rank, None)
        if known is not None:
            known.watch.close()
            if known.mark is not None:
                os.close(known.mark)
            if known.collectives is not None:
                known.collectives.close()

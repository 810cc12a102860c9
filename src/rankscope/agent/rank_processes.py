"""The processes of ranks, seen from outside: their states, places inside a step, and stacks.

On Linux the state comes from a pidfd, which stays with one process even if its number is reused,
and from ``/proc``. Elsewhere it is unknown.

A stuck rank sends nothing, and its last step was the same as on all others. So the training writes
its place into memory that the agent has opened, too: no system call, no lock, no thread. The agent
can read it when the process is stopped, stuck or gone. The memory is no file, leaves nothing behind
and takes no room in ``/dev/shm``.

py-spy only reads memory here (``--nonblocking``): it neither stops the process nor interrupts its
system call, and it can read a stopped process.
"""

import contextlib
import ctypes
import fcntl
import json
import logging
import mmap
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from rankscope.agent.frames import ALL_RANKS, FrameKind, pack
from rankscope.agent.hang_report import CodePlace, ProcessState, Reader, Stack, open_of_process
from rankscope.bus.words import printable
from rankscope.errors import install_command

if TYPE_CHECKING:
    from rankscope.agent.hosts import RemoteHosts


_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_SO_PEERPIDFD = 77  # Linux 6.5
_PIDFD_GET_INFO = 0xC040FF0B  # Linux 6.15, with the two below
_INFO_EXIT = 1 << 3
_INFO_BYTES = 64
_PR_SET_PTRACER = 0x59616D61
_NICE = 10


class ProcessWatch:
    """Watches one process, without privileges and without disturbing it.

    The caller must be sure that ``pid`` was not reused: its connection is still open, for instance.
    """

    def __init__(self, pid: int, pidfd: int | None = None) -> None:
        self.pid = pid
        self._ended = False
        self._pidfd = self._open() if pidfd is None else pidfd
        self._started = self._read()[1]

    @classmethod
    def of_peer(cls, connection: socket.socket) -> Self:
        """Watch the process that connected the other end of a Unix socket."""
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        pidfd = None
        with suppress(OSError):
            pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        return cls(_PEER_CREDENTIALS.unpack(peer)[0], pidfd)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process ends; −1 without one."""
        return -1 if self._pidfd is None else self._pidfd

    def state(self) -> ProcessState:
        """Return the state of the process; unknown where the system does not show it."""
        if self._ended or self._has_ended():
            self._ended = True
            return ProcessState.ENDED
        letter = self._read()[0]
        if not letter:
            return ProcessState.UNKNOWN
        return ProcessState.STOPPED if letter in "tT" else ProcessState.RUNNING

    def ending(self) -> str:
        """Return how it ended, ``exited with code 1`` or ``killed by SIGKILL``; mostly empty.

        Only the parent can always learn it; from Linux 6.15 others can, after the parent.
        """
        if self._pidfd is None:
            return ""
        info = bytearray(_INFO_BYTES)
        struct.pack_into("=Q", info, 0, _INFO_EXIT)
        try:
            fcntl.ioctl(self._pidfd, _PIDFD_GET_INFO, info)
        except OSError:
            return ""
        known = struct.unpack_from("=Q", info)[0]
        status = struct.unpack_from("=i", info, 60)[0]
        if not known & _INFO_EXIT:
            return ""
        return ending_of(os.waitstatus_to_exitcode(status))

    def close(self) -> None:
        """Close the descriptor; later states are unknown or by number."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _open(self) -> int | None:
        try:
            return os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._ended = True
        except (OSError, AttributeError):
            pass
        return None

    def _has_ended(self) -> bool:
        if self._pidfd is not None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            return bool(poll.poll(0))
        if not self._started:  # unknown: another user's process, or no /proc
            return False
        letter, started = self._read()
        return letter in ("", "Z", "X") or started != self._started

    def _read(self) -> tuple[str, int]:
        """Return the letter of its state and its start time; empty if unreadable."""
        try:
            fields = _stat_of(self.pid)
            return fields[0], int(fields[19])
        except (OSError, IndexError, ValueError):
            return "", 0


def _stat_of(pid: int) -> list[str]:
    """Return what ``/proc`` has of a process, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()


def busy_seconds_of(pid: int) -> tuple[float, float]:
    """Return the time in which a process computed, and that in which it waited for a CPU.

    It must not have ended unnoticed. 0 where that is unknown.
    """
    with suppress(OSError, IndexError, ValueError):
        fields = _stat_of(pid)
        computed = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return computed, sum(map(_waited_for_cpu, Path(f"/proc/{pid}/task").iterdir()))
    return 0.0, 0.0


def _waited_for_cpu(thread: Path) -> float:
    """Return the seconds for which a thread was ready to run, and did not; 0 if unknown."""
    with suppress(OSError, IndexError, ValueError):
        return int((thread / "schedstat").read_text("ascii").split()[1]) / 1e9
    return 0.0


def lower_priority() -> None:
    """Lower the priority of this thread of the agent, and of those that it starts."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def permit_inspection(agent_pid: int) -> None:
    """Permit the agent's process to read this one's memory: its Python stacks in a hang.

    With ``kernel.yama.ptrace_scope`` 1 (Debian, Ubuntu and others) only a parent may, or the
    process that this call permits; the agent is no parent. With 0, and in a kernel without Yama, no
    permission is needed; with 2 only ``CAP_SYS_PTRACE`` helps; with 3 nothing does. It never
    raises, and permits one process at a time: a later call replaces an earlier one, 0 permits none.
    A container may forbid all of it (its seccomp profile, or another user's process).
    """
    with suppress(Exception):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(agent_pid), 0, 0, 0)


def ending_of(exit_code: int) -> str:
    """Return how a process ended, from its exit code as ``subprocess`` has it.

    Example:
        >>> ending_of(1), ending_of(-9)
        ('exited with code 1', 'killed by SIGKILL')
    """
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


_NAME = "rankscope-progress"
_PHASES = ("forward", "backward", "step")
_NUMBERS = {phase: number for number, phase in enumerate(_PHASES)}
_WORD = struct.Struct("=q")
_PASSES_BITS = 20
_PHASE_BITS = 2
_MOST_PASSES = (1 << _PASSES_BITS) - 1


class ProgressMark:
    """The training's end. Its descriptor's number is in the hello frame."""

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        self._identity = os.fstat(self._file).st_ino
        os.ftruncate(self._file, mmap.PAGESIZE)
        self._word = memoryview(mmap.mmap(self._file, mmap.PAGESIZE)).cast("q")  # set at once
        self._step = -1
        self._passes = 0

    def fileno(self) -> int:
        """Return the descriptor of the memory; −1 once it is closed."""
        return self._file

    def beat(self, step: int, phase: str) -> None:
        """Write the place of the training, in less than a microsecond.

        ``"forward"`` and ``"backward"`` are written as these passes begin, ``"step"`` as the
        backward pass has ended.
        """
        self._passes = self._passes + 1 if step == self._step else 1
        self._step = step
        passes = self._passes if self._passes < _MOST_PASSES else _MOST_PASSES
        self._word[0] = (step << _PASSES_BITS | passes) << _PHASE_BITS | _NUMBERS[phase]

    def close(self) -> None:
        """Close the descriptor; the agent's stays valid."""
        file = self._file
        self._file = -1
        with contextlib.suppress(OSError):  # a script may close files that are not its own
            if file >= 0 and os.fstat(file).st_ino == self._identity:
                os.close(file)


def read_mark(descriptor: int) -> CodePlace | None:
    """Return the last place of the training; None before the first step, or if unreadable."""
    try:
        word = _WORD.unpack(os.pread(descriptor, _WORD.size, 0))[0]
    except (OSError, struct.error):
        return None
    if not word:
        return None
    rest, phase = divmod(word, 1 << _PHASE_BITS)
    step, passes = divmod(rest, 1 << _PASSES_BITS)
    return CodePlace(step, passes, _PHASES[phase]) if phase < len(_PHASES) else None


NUM_FRAMES = 12
_STACK_SECONDS = 5.0  # that one stack may take, and all collectives together

NO_PERMISSION = (
    "the system does not let the agent read this process; set kernel.yama.ptrace_scope to 0 or 1, "
    "or give a container CAP_SYS_PTRACE (docker run --cap-add SYS_PTRACE)"
)


def stacks_of(threads: Mapping[int, int]) -> dict[int, Stack]:
    """Return the Python stack of the training thread of each process; blocks meanwhile.

    ``threads`` has the training thread's ``threading.get_native_id()`` by process, 0 for the main
    thread. Without a stack, its ``missing`` is the reason.
    """
    program = _find()
    if program is None:
        why = "py-spy, which shows Python stacks of hangs, is not installed where the agent runs"
        return {pid: _missing(f"{why}: {install_command('hangs')}") for pid in threads}
    return {pid: _stack_of(program, pid, thread) for pid, thread in threads.items()}


class StackTaker:
    """Runs :func:`stacks_of` in a thread of its own."""

    def __init__(
        self,
        threads: Mapping[int, int],
        collectives: Mapping[int, Reader] = MappingProxyType({}),
    ) -> None:
        self.stacks: dict[int, Stack] | None = None  # by process; None until they are there
        self._threads = dict(threads)
        self._collectives = dict(collectives)
        worker = threading.Thread(target=self._take, name="rankscope-stacks", daemon=True)
        try:
            worker.start()
        except RuntimeError as error:  # no thread can be started
            self._fail(str(error))

    def _take(self) -> None:
        try:
            for reader in self._collectives.values():
                reader.request()
            until = time.monotonic() + _STACK_SECONDS
            known = {pid: reader.read(until) for pid, reader in self._collectives.items()}
            stacks = stacks_of(self._threads)
            for pid, collectives in known.items():
                stacks[pid]["collectives"] = collectives
            self.stacks = stacks
        except Exception as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        self.stacks = {pid: _missing(reason) for pid in self._threads}


def _find() -> str | None:
    """Return the path of py-spy: beside this Python, or on PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def _stack_of(program: str, pid: int, thread: int) -> Stack:
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_STACK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _missing(f"py-spy did not answer within {_STACK_SECONDS:g} s")
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
        mark: int | None = None
        reader: Reader | None = None
        if "progress" in hello:
            with contextlib.suppress(OSError):  # closed, or another user's
                number = int(hello["progress"])
                mark = open_of_process(watch.pid, number, os.O_RDONLY, f"/memfd:{_NAME}")
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
        taken = None if self._taker is None else self._taker.stacks
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

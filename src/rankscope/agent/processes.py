"""The state of a process, seen from outside, and the place of a training inside its step.

On Linux the state comes from a pidfd, which stays with one process even if its number is reused,
and from ``/proc``. Elsewhere it is unknown.

A stuck rank sends nothing, and its last step was the same as on all others. So the training writes
its place into memory that the agent has opened, too: no system call, no lock, no thread. The agent
can read it when the process is stopped, stuck or gone. The memory is no file, leaves nothing behind
and takes no room in ``/dev/shm``.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Self

from rankscope.agent.hang_report import CodePlace, ProcessState, open_of_process

_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_SO_PEERPIDFD = 77  # Linux 6.5
_PIDFD_GET_INFO = 0xC040FF0B  # Linux 6.15, with the two below
_INFO_EXIT = 1 << 3
_INFO_BYTES = 64
_PR_SET_PTRACER = 0x59616D61
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_BEST_EFFORT_LAST = 2 << 13 | 7
_NICE = 10


class ProcessWatch:
    """Watches one process, without privileges and without disturbing it.

    The caller must be sure that ``pid`` was not reused: its connection is still open, for instance.
    """

    def __init__(self, pid: int, pidfd: int | None = None) -> None:
        self.pid = pid
        self._ended = False
        self._pidfd = self._open() if pidfd is None else pidfd
        self._stat = Path(f"/proc/{pid}/stat")
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
            fields = self._stat.read_text("ascii", "replace").rpartition(")")[2].split()
            return fields[0], int(fields[19])
        except (OSError, IndexError, ValueError):
            return "", 0


def cpu_seconds_of(pid: int) -> float:
    """Return the CPU time of a process that cannot have ended unnoticed; 0 where it is unknown."""
    with suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def lower_priority() -> None:
    """Let this thread of the agent, and threads that it starts, give way to the training."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    number = _IOPRIO_SET.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, 1, 0, _BEST_EFFORT_LAST)


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
    if exit_code < 0:
        return f"killed by {_signal_name(-exit_code)}"
    return f"exited with code {exit_code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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
        with contextlib.suppress(OSError):  # a script may close all files that it does not know
            if file >= 0 and os.fstat(file).st_ino == self._identity:
                os.close(file)


def open_mark(pid: int, number: int) -> int | None:
    """Return a descriptor of the memory in which another process of this user writes its mark.

    ``number`` is that process's own descriptor, from its hello frame. The caller closes the
    descriptor. None if there is no mark: the process has closed it, or is another user's.
    """
    try:
        return open_of_process(pid, number, os.O_RDONLY, f"/memfd:{_NAME}")
    except OSError:
        return None


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

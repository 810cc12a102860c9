"""The place of a training inside its step: a word of shared memory that its agent can read.

A stuck rank sends nothing, and its last step was the same as on all others. So the training writes
its place into memory that the agent has opened, too: no system call, no lock, no thread. The agent
can read it when the process is stopped, stuck or gone. The memory is no file, leaves nothing behind
and takes no room in ``/dev/shm``.
"""

import contextlib
import mmap
import os
import struct
from pathlib import Path

from rankscope.agent.hang_report import CodePlace

_NAME = "rankscope-progress"
_PHASES = ("forward", "backward", "step")
_NUMBERS = {phase: number for number, phase in enumerate(_PHASES)}
_WORD = struct.Struct("=q")
_PASSES_BITS = 20
_PHASE_BITS = 2
_MOST_PASSES = (1 << _PASSES_BITS) - 1


class ProgressMark:
    """The training's end. Its descriptor's number is in the hello frame.

    Raises:
        OSError: The system has no such memory.
    """

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

        Args:
            step: The current step.
            phase: ``"forward"`` and ``"backward"`` as these passes begin, ``"step"`` as the
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
    descriptor = None
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
        opened = Path(f"/proc/self/fd/{descriptor}").readlink()
        if str(opened).startswith(f"/memfd:{_NAME}"):
            return descriptor
    except OSError:
        pass
    if descriptor is not None:
        os.close(descriptor)
    return None


def read_mark(descriptor: int) -> CodePlace | None:
    """Return the last place of the training; None before the first step, or if unreadable.

    ``descriptor`` is from :func:`open_mark`.
    """
    try:
        word = _WORD.unpack(os.pread(descriptor, _WORD.size, 0))[0]
    except (OSError, struct.error):
        return None
    if not word:
        return None
    rest, phase = divmod(word, 1 << _PHASE_BITS)
    step, passes = divmod(rest, 1 << _PASSES_BITS)
    return CodePlace(step, passes, _PHASES[phase]) if phase < len(_PHASES) else None

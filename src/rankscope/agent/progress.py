"""Where a training is between two messages: a word of memory that its agent can read.

A rank that is stuck sends nothing, and in its last step it was as far as all others. The probe
writes its place into memory that the agent has opened, too: no system call, no lock, no thread; and
it can be read when the process is stopped, stuck or gone. The memory is no file, so that nothing is
left behind, and takes no room in ``/dev/shm``.
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
_PASSES_BITS, _PHASE_BITS = 20, 2
_MOST_PASSES = (1 << _PASSES_BITS) - 1


class ProgressMark:
    """The probe's end. The number of its descriptor goes to the agent with the greeting.

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
        self._step, self._passes = -1, 0

    def fileno(self) -> int:
        """Return the descriptor of the memory; −1 once it is closed."""
        return self._file

    def beat(self, step: int, phase: str) -> None:
        """Note where the training is, for less than a microsecond.

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
        """Give back the descriptor; the agent's stays good."""
        file, self._file = self._file, -1
        with contextlib.suppress(OSError):  # a script may close all files that it does not know
            if file >= 0 and os.fstat(file).st_ino == self._identity:
                os.close(file)


def open_mark(pid: int, number: int) -> int | None:
    """Return a descriptor of the memory in which another process of this user writes its mark.

    Args:
        pid: That process.
        number: Its own descriptor of the memory, as its greeting says.

    Returns:
        A descriptor of this process, to be closed by the caller; None if there is no mark, as when
        that process has closed it, or is another user's.
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
    """Return where the training was last.

    Args:
        descriptor: From :func:`open_mark`.

    Returns:
        None before the first step began, or if it cannot be read.
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

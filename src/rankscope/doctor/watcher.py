"""Watches a worker from a thread of its own: whether it hangs, and whether it was told to end."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rankscope.doctor.meeting import Meeting
from rankscope.doctor.user_code import where_it_is

FINISHED = "finished"
"""Announced by rank 0 when it has told what was found."""
TOLD = "told"
"""Posted by each worker that was told to end by a signal."""

_PAUSE = 0.05


class Watcher:
    """Calls back when this worker hangs in a stage, or is told to end.

    The signal is noticed even while the main thread is inside a library that does not return: it
    is written into a pipe at once.

    Args:
        meeting: A connection to the other workers that only this thread uses.
        seconds: How long a stage may take.
        on_stuck: Called once with the stage, in the watcher's thread.
        on_told: Called once, in the watcher's thread.
    """

    def __init__(
        self,
        meeting: Meeting,
        seconds: float,
        *,
        on_stuck: Callable[[str], None],
        on_told: Callable[[], None],
    ) -> None:
        self._meeting = meeting
        self._seconds = seconds
        self._on_stuck = on_stuck
        self._on_told = on_told
        self._main = threading.get_ident()
        self._stage: tuple[str, float] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rankscope-doctor", daemon=True)
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._before: Any = None
        self._fd_before = -1

    def __enter__(self) -> "Watcher":
        if threading.current_thread() is threading.main_thread():
            self._fd_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            self._before = signal.signal(signal.SIGTERM, _leave_it_to_the_watcher)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            signal.set_wakeup_fd(self._fd_before)
        os.close(self._reading)
        os.close(self._writing)

    @contextmanager
    def watching(self, stage: str) -> Iterator[None]:
        """Watch the main thread while it works on a stage."""
        self._stage = (stage, time.monotonic())
        try:
            yield
        finally:
            self._stage = None

    def _watch(self) -> None:
        known = ""
        while not self._over.is_set():
            ready, _, _ = select.select([self._reading], [], [], _PAUSE)
            if ready and signal.SIGTERM in os.read(self._reading, 64):
                self._meeting.post(TOLD, True)
                self._on_told()
                return
            stage = self._stage
            if stage is None or time.monotonic() - stage[1] < self._seconds:
                continue
            if stage[0] != known:
                known = stage[0]
                where = where_it_is(sys._current_frames().get(self._main))
                self._meeting.post(f"stuck/{known}", where)
                self._on_stuck(known)
            if self._is_finished():
                os._exit(0)  # the main thread cannot be interrupted; rank 0 has said what it did

    def _is_finished(self) -> bool:
        try:
            return bool(self._meeting.heard(FINISHED))
        except RuntimeError:
            return True  # rank 0 has ended, and the meeting place with it


def _leave_it_to_the_watcher(number: int, frame: FrameType | None) -> None:
    """Let the main thread go on: the watcher ends the process when it has told why."""

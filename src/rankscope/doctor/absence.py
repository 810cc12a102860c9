"""Workers that fail, hang, die or never come: how they are noticed, and what is said of them."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rankscope.diagnose.rules import name_ranks
from rankscope.doctor.functions import where_it_is
from rankscope.doctor.meeting import Meeting
from rankscope.doctor.stage import CheckResult, Stage, Status, ranks_by

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


Word = Mapping[str, Any]
"""What one worker posted on a stage: ``facts``, ``error`` or ``usage``."""


def skipped(stage: Stage, why: str) -> CheckResult:
    """Return the result of a stage that was left out."""
    return CheckResult(stage.topic, Status.SKIPPED, why)


def failed_somewhere(stage: Stage, words: Sequence[Word]) -> tuple[CheckResult, str]:
    """Return the result of a stage that raised on some workers, and why others are skipped.

    Args:
        stage: The stage.
        words: What each worker posted, in rank order.
    """
    by_error = ranks_by([str(word.get("error") or word.get("usage") or "") for word in words])
    by_error.pop("", None)
    ranks = sorted(rank for group in by_error.values() for rank in group)
    told = "; ".join(f"{name_ranks(group)}: {error}" for error, group in by_error.items())
    advice = stage.advice or "See the exception; run this rank's function alone for its traceback."
    if len(ranks) < len(words):
        advice += f" The other {'rank' if len(words) - len(ranks) == 1 else 'ranks'} had no error."
    numbers = {"errors": by_error}
    result = CheckResult(stage.topic, Status.ERROR, told, advice, numbers, tuple(ranks))
    return result, f"{stage.title} failed on {name_ranks(ranks)}"


def unfinished(
    stage: Stage, words: Mapping[int, Word], meeting: Meeting, seconds: float
) -> CheckResult:
    """Return the result of a stage that some workers did not finish in time.

    Args:
        stage: The stage.
        words: What came in time, by rank.
        meeting: Where the workers' other words are.
        seconds: How long the stage was allowed to take.
    """
    missing = [rank for rank in range(meeting.num_ranks) if rank not in words]
    places: dict[str, list[int]] = {}
    for rank, where in meeting.said(f"stuck/{stage.topic}").items():
        if rank in missing:
            places.setdefault(str(where), []).append(rank)
    errors = {rank: str(word["error"]) for rank, word in words.items() if "error" in word}
    arrivals = {rank: meeting.store.add(f"here/{rank}", 0) for rank in range(meeting.num_ranks)}
    never = [rank for rank in missing if not arrivals[rank]]
    twice = [rank for rank, number in arrivals.items() if number > 1]
    placed = {rank for group in places.values() for rank in group}
    silent = [rank for rank in missing if rank not in placed and rank not in never]
    told = [f"{name_ranks([rank])}: {error}" for rank, error in errors.items()]
    if never:
        came = meeting.num_ranks - len(never)
        told.append(
            f"{name_ranks(never)} did not start within {seconds:g} s; {came} of "
            f"{meeting.num_ranks} came"
        )
    if twice:
        told.append(f"{name_ranks(twice)} came more than once")
    if silent:
        does = "does" if len(silent) == 1 else "do"
        told.append(f"{name_ranks(silent)} {does} not answer any more")
    for where, ranks in sorted(places.items(), key=lambda item: len(item[1])):
        verb = "is" if len(ranks) == 1 else "are"
        told.append(
            f"{name_ranks(ranks)} did not finish within {seconds:g} s and {verb} at {where}"
        )
    return CheckResult(
        stage.topic,
        Status.ERROR,
        "; ".join(told),
        _advice(never=never, errors=errors, places=places),
        {"missing": missing, "errors": errors, "places": places},
        ranks=tuple(sorted({*errors, *missing, *twice})),
    )


def gone_while_working(stage: Stage, gone: Sequence[int]) -> CheckResult:
    """Return the result of a stage in which the launcher ended all workers.

    Args:
        stage: The stage.
        gone: Ranks that had ended before that.
    """
    if not gone:
        found = "the launcher or a scheduler asked all ranks to end"
        return CheckResult(stage.topic, Status.ERROR, found, "Start the preflight again.")
    found = f"{name_ranks(gone)} ended without a word, so the launcher ended the others"
    advice = (
        "A process that ends like this was killed (out of memory?) or crashed in a library: "
        "look at its exit code in the launcher's lines below, and at its host's system log."
    )
    return CheckResult(stage.topic, Status.ERROR, found, advice, ranks=tuple(gone))


def _advice(
    *, never: Sequence[int], errors: Mapping[int, str], places: Mapping[str, Sequence[int]]
) -> str:
    if never:
        return (
            f"Look at the log and the host of {name_ranks(never)}: did the launcher start it, does "
            "it reach the others? If it is only slow to start, raise --seconds."
        )
    if errors:
        return f"Repair what failed on {name_ranks(list(errors))}; the others waited for it."
    if len(places) > 1:
        return (
            "Look at the rank that is at another place than the rest: ranks wait for each other in "
            "collectives. If the work takes that long, raise --seconds."
        )
    return "Look at that line. If the work does take that long, raise --seconds."

"""Goes through the stages on every worker; rank 0 judges, and tells who hangs or fails."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from rankscope.diagnose.rules import name_ranks
from rankscope.doctor.absence import (
    FINISHED,
    TOLD,
    Watcher,
    failed_somewhere,
    gone_while_working,
    skipped,
    unfinished,
)
from rankscope.doctor.functions import in_one_line
from rankscope.doctor.meeting import Meeting
from rankscope.doctor.stage import Bench, CheckResult, Stage
from rankscope.errors import RankscopeError, UsageError
from rankscope.record.files import to_plain

GRACE = 1.5
"""Seconds that rank 0 waits longer than a stage may take, for words on their way."""

Report = Callable[[Sequence[CheckResult]], int]
"""Prints what was found and returns the exit code; called once, on rank 0."""


class Examination:
    """One worker's part in the preflight.

    Args:
        stages: What to do, in order; the first needs no process group and counts the workers.
        bench: What this worker's checks work with.
        meetings: Two connections to the others: for the main thread, and for the watcher's.
        report: Called on rank 0 with all results.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        bench: Bench,
        meetings: tuple[Meeting, Meeting],
        report: Report,
    ) -> None:
        self._stages = stages
        self._bench = bench
        self._meeting, self._other_meeting = meetings
        self._report = report
        self._seconds = bench.options.seconds
        self._results: list[CheckResult] = []
        self._why_skipped: dict[str, str] = {}
        self._at: Stage = stages[0]
        self._began = time.monotonic()
        self._concluding = threading.Lock()

    def run(self) -> int:
        """Go through all stages; return this process's exit code, which only rank 0's matters.

        Raises:
            UsageError: A function that the user named exists on no worker.
        """
        self._meeting.count_in(f"here/{self._meeting.rank}")
        try:
            with Watcher(
                self._other_meeting, self._seconds, on_stuck=self._stuck, on_told=self._told
            ) as watcher:
                goes_on = all(self._go_through(stage, watcher) for stage in self._stages)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        if self._meeting.rank == 0:
            return self._finish()
        if goes_on:
            self._wait_for_the_end()
        return 0

    def _go_through(self, stage: Stage, watcher: Watcher) -> bool:
        """Do one stage; whether there is more to do."""
        self._at, self._began = stage, time.monotonic()
        first = self._meeting.rank == 0
        if stage.topic in self._why_skipped:
            if first:
                self._results.append(skipped(stage, self._why_skipped[stage.topic]))
            return True
        with watcher.watching(stage.topic):
            word = self._look(stage)
        self._meeting.post(stage.topic, word)
        if first:
            self._judge(stage)
            return True
        return self._hear(stage)

    def _look(self, stage: Stage) -> dict[str, Any]:
        try:
            return {"facts": to_plain(stage.look(self._bench))}
        except (Exception, SystemExit) as error:
            kind = "usage" if isinstance(error, UsageError) else "error"
            return {kind: in_one_line(error), "ours": isinstance(error, RankscopeError)}

    def _judge(self, stage: Stage) -> None:
        until = self._began + self._seconds + GRACE
        words = self._meeting.collect(stage.topic, until)
        if len(words) < self._meeting.num_ranks:
            self._conclude(unfinished(stage, words, self._meeting, self._seconds))
        ordered = [words[rank] for rank in sorted(words)]
        if all("usage" in word for word in ordered):
            self._meeting.announce(FINISHED)
            raise UsageError(ordered[0]["usage"])
        if all("facts" in word for word in ordered):
            self._results += stage.judge([word["facts"] for word in ordered])
            skips: dict[str, str] = {}
        else:
            result, why = failed_somewhere(stage, ordered)
            self._results.append(result)
            skips = self._skips_after(stage, why)
        self._why_skipped |= skips
        self._meeting.announce(f"go/{stage.topic}", skips)

    def _skips_after(self, stage: Stage, why: str) -> dict[str, str]:
        """Return the stages that cannot follow a failed one, and why."""
        return {
            other.topic: why
            for other in self._stages
            if other.topic in stage.blocks or (stage.together and other.needs_group)
        }

    def _hear(self, stage: Stage) -> bool:
        """Wait for rank 0's word on a stage; whether there is more to do."""
        until = time.monotonic() + 2 * self._seconds + 10
        topic = f"go/{stage.topic}"
        try:
            if not self._meeting.wait((topic, FINISHED), until):
                self._rank_0_is_gone(stage)
            skips = self._meeting.heard(topic)
        except RuntimeError:
            return False  # rank 0 has ended, and the meeting place with it
        if skips is None:
            return False
        self._why_skipped |= skips
        return True

    def _rank_0_is_gone(self, stage: Stage) -> None:
        """Say so, from one of the other ranks."""
        if self._meeting.count_in("speaker") > 1:
            raise SystemExit(1)
        came = self._meeting.said(self._stages[0].topic)
        missing = [rank for rank in range(self._meeting.num_ranks) if rank not in came]
        raise RankscopeError(
            f"{name_ranks(missing or [0])} did not {'answer' if came.get(0) else 'start'} while "
            f"the others were at {stage.title.lower()!r}: look at its log and at its host"
        )

    def _stuck(self, topic: str) -> None:
        """Rank 0 itself hangs: tell from the watcher's thread what is known."""
        if self._meeting.rank != 0:
            return
        time.sleep(GRACE)
        words = self._other_meeting.said(topic)
        if 0 not in words:
            self._conclude(unfinished(self._at, words, self._other_meeting, self._seconds))

    def _told(self) -> None:
        """A signal asked to end: a launcher sends it to all when one worker has died."""
        if self._meeting.rank != 0:
            os._exit(1)
        alive = self._other_meeting.collect(TOLD, time.monotonic() + GRACE)
        gone = sorted(set(range(self._meeting.num_ranks)) - set(alive))
        self._conclude(gone_while_working(self._at, gone))

    def _conclude(self, result: CheckResult) -> NoReturn:
        """End early: what follows is skipped, and no thread is waited for."""
        if not self._concluding.acquire(blocking=False):
            threading.Event().wait()  # the other thread is concluding, and ends the process
        later = self._stages[list(self._stages).index(self._at) + 1 :]
        rest = [skipped(stage, "not reached") for stage in later if not stage.blocks]
        code = 1
        try:
            code = self._report([*self._results, result, *rest])
            self._other_meeting.announce(FINISHED)
        finally:
            os._exit(code)

    def _finish(self) -> int:
        code = self._report(self._results)
        self._meeting.announce(FINISHED)
        return code

    def _wait_for_the_end(self) -> None:
        try:
            self._meeting.wait((FINISHED,), time.monotonic() + self._seconds)
        except RuntimeError:
            return  # rank 0 has ended, and the meeting place with it

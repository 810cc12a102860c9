"""Writes the record for the root; a file system that fails for a while ends nothing."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rankscope.bus.finding import Finding
from rankscope.bus.step import StepReport
from rankscope.errors import RunError
from rankscope.record import RunWriter
from rankscope.stats.state import State

_log = logging.getLogger("rankscope")

FIRST_PAUSE = 1.0  # seconds from a failed write to the next try; each pause is twice the last

LONGEST_PAUSE = 60.0  # the longest of these pauses, in seconds
MOST_KEPT_BYTES = 256 << 20  # with more bytes waiting after failed writes, no further step is kept
GIVE_UP_SECONDS = 1800.0  # the same once writes have failed for this long

_MOST_FINDINGS = 4096
_LAST_PAUSES = (0.1, 0.4)  # between tries to close, while ranks wait


class Recorder:
    """Writes steps and findings; after a failed write they are kept, and written later.

    A record that ends early has all steps up to its last one. Only ``close`` raises when a file
    cannot be written.
    """

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer
        self._findings: list[Finding] = []
        self._failing_since: float | None = None
        self._next_try = 0.0
        self._pause = FIRST_PAUSE
        self._failures = self._num_left_out = 0
        self._first_left_out: int | None = None

    @property
    def path(self) -> Path:
        """The run's directory, which may have been moved."""
        return self._writer.path

    def add_many(self, reports: Sequence[StepReport]) -> None:
        """Keep consecutive steps for the next flush."""
        if self._has_ended or (self._failing_since is not None and self._is_hopeless):
            self._leave_out(reports)
        else:
            self._writer.add_many(reports)

    def add_findings(self, findings: Iterable[Finding]) -> None:
        """Write findings at once, or as soon as possible."""
        self._findings += findings
        if len(self._findings) > _MOST_FINDINGS:  # the last event of each is enough
            self._findings = list({finding.id: finding for finding in self._findings}.values())
        if self._findings and self._may_try:
            self._try(self._write_findings)

    def describe(self, **facts: Any) -> None:
        """Put facts into ``run.json``, with the next flush."""
        self._writer.describe(**facts)

    def flush(self) -> bool:
        """Write all kept data, unless a write has just failed; return whether it was written."""
        return self._may_try and self._try(self._write)

    def flush_if_due(self) -> bool:
        """Write all kept data when it is due; return whether it was written."""
        if self._failing_since is not None:
            return self.flush()
        return self._try(self._writer.flush_if_due)

    def save_state(self, take: Callable[[], State], *, at_end: bool = False) -> None:
        """Write the detectors' state, unless the record lacks steps that they have seen."""
        if not self._has_ended:
            self._try(lambda: self._writer.save_state(take, at_end=at_end))

    def close(self, status: str, **facts: Any) -> None:
        """Write the remaining data, and status and further facts in ``run.json``."""
        if self._failures:
            facts["failed_writes"] = self._failures
        if self._has_ended:
            status = "incomplete"
            facts["unwritten"] = {
                "first_step": self._first_left_out, "steps": self._num_left_out
            }  # fmt: skip
        for pause in (*_LAST_PAUSES, None):
            try:
                self._write()
                self._writer.close(status, **facts)
            except RunError as error:
                if pause is None:
                    self._end_early(error, status, facts)
                    raise
                time.sleep(pause)
            else:
                return

    def _end_early(self, error: RunError, status: str, facts: dict[str, Any]) -> None:
        """Record what is missing: a small file may be written where the rest may not."""
        waiting = self._writer.waiting_steps
        facts["failed_writes"] = self._failures + 1 + len(_LAST_PAUSES)
        if waiting or self._has_ended:
            facts["unwritten"] = {
                "first_step": min(waiting, default=self._first_left_out),
                "steps": len(waiting) + self._num_left_out,
                "why": getattr(error.__cause__, "strerror", None) or str(error),
            }
        elif not self._findings:
            facts["status"] = status  # nothing is missing but this
        with contextlib.suppress(RunError):
            self._writer.end_early(**facts)

    @property
    def _has_ended(self) -> bool:
        return self._first_left_out is not None

    @property
    def _may_try(self) -> bool:
        return self._failing_since is None or time.monotonic() >= self._next_try

    @property
    def _is_hopeless(self) -> bool:
        failing = 0.0 if self._failing_since is None else time.monotonic() - self._failing_since
        return failing > GIVE_UP_SECONDS or self._writer.waiting_bytes > MOST_KEPT_BYTES

    def _leave_out(self, reports: Sequence[StepReport]) -> None:
        if self._first_left_out is None and reports:
            self._first_left_out = reports[0].step
            _log.warning(
                "the record in %s ends before step %d, as it cannot be written for too long; "
                "detectors and sinks go on, and what was kept is written if that is possible again",
                self._writer.path,
                self._first_left_out,
            )
        self._num_left_out += len(reports)

    def _write(self) -> None:
        self._write_findings()
        self._writer.flush()

    def _write_findings(self) -> None:
        self._writer.add_findings(self._findings)
        self._findings = []

    def _try(self, write: Callable[[], bool | None]) -> bool:
        """Return whether a write was done; record its failure or success."""
        try:
            done = write()
        except RunError as error:
            self._note_failure(error)
            return False
        if done is not False and self._failing_since is not None:
            self._note_success()
        return done is not False

    def _note_failure(self, error: RunError) -> None:
        now = time.monotonic()
        self._failures += 1
        if self._failing_since is None:
            self._failing_since = now
            self._pause = FIRST_PAUSE
            _log.warning("%s. The monitor goes on: the data is kept, and written later", error)
        self._next_try = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _note_success(self) -> None:
        if self._findings or self._writer.waiting_bytes:
            return  # a part of it
        assert self._failing_since is not None
        _log.warning(
            "the record in %s is written again after %.0f s; %s",
            self._writer.path,
            time.monotonic() - self._failing_since,
            "it ends early" if self._has_ended else "nothing is missing",
        )
        self._failing_since = None

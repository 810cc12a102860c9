"""All sinks of a run, behind calls that never wait and never raise.

Each sink has a thread and a queue of its own, so that it can be slow, hang or fail alone.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from operator import itemgetter

from rankscope.bus.finding import Finding
from rankscope.bus.step import StepReport
from rankscope.errors import RankscopeError
from rankscope.sinks.base import MAX_NAMED, RunInfo, Sink, StepValues, step_values
from rankscope.sinks.specs import PlannedSink

_log = logging.getLogger("rankscope")

CLOSE_SECONDS = 5.0  # that ``close`` waits for all sinks; then they go on until the process ends


MAX_STEPS = 256  # steps that may wait for a sink; with more, the oldest are left out

MAX_FINDINGS = 1024  # that may wait; with more, those that a later one replaces are left out


class Feeder:
    """Feeds one sink from a bounded queue, in a daemon thread."""

    def __init__(self, name: str, sink: Sink, run: RunInfo) -> None:
        self.name = name
        self.lost_steps = 0
        self._sink = sink
        self._info = run
        self._takes_steps = bool(getattr(sink, "takes_steps", True))
        self._numbers = itertools.count()
        self._steps: deque[tuple[int, StepValues]] = deque()
        self._findings: deque[tuple[int, Finding]] = deque()
        self._changed = threading.Condition()
        self._ending = False
        self.off = False  # whether the sink has failed
        self._left = False  # whether it was left behind
        self._thread = threading.Thread(target=self._work, name=f"rankscope-{name}", daemon=True)
        self._thread.start()

    def step(self, values: StepValues) -> None:
        """Queue a step; never waits for the sink."""
        if not self._takes_steps:
            return
        with self._changed:
            if self.off or self._ending:
                return
            full = len(self._steps) >= MAX_STEPS
            if full:
                self._steps.popleft()
                self.lost_steps += 1
            self._steps.append((next(self._numbers), values))
            self._changed.notify()
            first = full and self.lost_steps == 1
        if first:
            _log.warning(
                "sink %s is slow: %d steps wait for it, and from now on the oldest are not shown "
                "there; training is not delayed, and the run directory holds them all",
                self.name,
                MAX_STEPS,
            )

    def finding(self, finding: Finding) -> None:
        """Queue a finding; never waits for the sink."""
        with self._changed:
            if self.off or self._ending:
                return
            self._findings.append((next(self._numbers), finding))
            if len(self._findings) > MAX_FINDINGS:
                latest = {each.id: (number, each) for number, each in self._findings}
                self._findings = deque(sorted(latest.values(), key=itemgetter(0))[-MAX_FINDINGS:])
            self._changed.notify()

    def finish(self) -> None:
        """Let the sink end after its queue is empty."""
        with self._changed:
            self._ending = True
            self._changed.notify()

    def join(self, seconds: float) -> bool:
        """Wait for the sink's end; return whether it came. A slow one goes on with its queue."""
        self._thread.join(max(seconds, 0.0))
        self._left = self._thread.is_alive()
        return not self._left

    @property
    def num_waiting(self) -> int:
        """Number of steps and findings that wait for the sink."""
        return len(self._steps) + len(self._findings)

    def _take(self) -> StepValues | Finding | None:
        """Return the oldest entry of the queue; None at the end."""
        with self._changed:
            while not (self._steps or self._findings or self._ending or self.off):
                self._changed.wait()
            if self._steps and (not self._findings or self._steps[0][0] < self._findings[0][0]):
                return self._steps.popleft()[1]
            return self._findings.popleft()[1] if self._findings else None

    def _work(self) -> None:
        try:
            self._sink.open(self._info)
            while (item := self._take()) is not None:
                if isinstance(item, Finding):
                    self._sink.finding(item)
                else:
                    self._sink.step(item)
        except BaseException as error:  # a library may raise SystemExit: it ends this thread alone
            self._fail(error)
            with contextlib.suppress(BaseException):
                self._sink.close()
            return
        try:
            self._sink.close()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.off = True
            self._steps.clear()
            self._findings.clear()
        if self._left:
            return
        foreseen = isinstance(error, RankscopeError | OSError)
        _log.warning(
            "sink %s has failed and gets nothing from now on; training and record go on. %s",
            self.name,
            error if isinstance(error, RankscopeError) else f"{type(error).__name__}: {error}",
            exc_info=None if foreseen else error,
        )


class Sinks:
    """Passes steps and findings to sinks, on rank 0 alone."""

    def __init__(self, planned: Sequence[PlannedSink], run: RunInfo) -> None:
        self._closing = threading.Lock()
        self._closed = self._broken = False
        self._named: list[int] = []
        self._open: dict[str, Finding] = {}
        self._learn(run.findings)
        self._feeders = [f for each in planned if (f := _start(each, run)) is not None]

    def step(self, report: StepReport, findings: Sequence[Finding]) -> None:
        """Pass a step and its findings to the sinks."""
        if self._broken or all(feeder.off for feeder in self._feeders):
            return
        try:
            self._learn(findings)
            counts = Counter(finding.severity for finding in self._open.values())
            values = step_values(report, self._named, counts)
            for feeder in self._feeders:
                feeder.step(values)
            self.findings(findings)
        except Exception as error:
            self._broken = True
            _log.warning("sinks get nothing from now on; the record goes on", exc_info=error)

    def findings(self, findings: Iterable[Finding]) -> None:
        """Pass findings to the sinks."""
        for finding in findings:
            for feeder in self._feeders:
                feeder.finding(finding)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """End all sinks after their queues are empty, in so many seconds for all together."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + seconds
        for feeder in self._feeders:
            feeder.finish()
        for feeder in self._feeders:
            ended = feeder.join(deadline - time.monotonic())
            if not ended:
                _log.warning(
                    "sink %s did not end within %g s and is left behind: %s, and may not be shown "
                    "there; the run directory holds all",
                    feeder.name,
                    seconds,
                    f"{feeder.num_waiting:,} of its steps and findings wait",
                )
            if feeder.lost_steps:
                _log.warning(
                    "sink %s was slow: %d steps are not shown there; the run directory holds them",
                    feeder.name,
                    feeder.lost_steps,
                )

    def _learn(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            if finding.status == "open":
                self._open[finding.id] = finding
            else:
                self._open.pop(finding.id, None)
            new = [rank for rank in finding.ranks if rank not in self._named]
            self._named += new[: MAX_NAMED - len(self._named)]


def _start(planned: PlannedSink, run: RunInfo) -> Feeder | None:
    """Return the feeder of a sink; None if its package is there but broken."""
    try:
        return Feeder(planned.name, planned.make(), run)
    except Exception as error:
        _log.warning(
            "sink %s cannot start; training and record go on without it. %s: %s",
            planned.name,
            type(error).__name__,
            error,
        )
        return None

"""All sinks of a run, as the scope sees them: two calls that never wait and never raise."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from rankscope.core.finding import Finding
from rankscope.core.step import StepReport
from rankscope.sinks.base import MAX_NAMED, RunInfo, step_values
from rankscope.sinks.feeder import Feeder
from rankscope.sinks.specs import PlannedSink

_log = logging.getLogger("rankscope")

CLOSE_SECONDS = 5.0
"""How long ``close`` waits for all sinks together; what hangs is then left behind."""


class Sinks:
    """Hands steps and findings to sinks; made on rank 0 alone.

    Args:
        planned: The sinks, in order.
        run: What each of them is told first.
    """

    def __init__(self, planned: Sequence[PlannedSink], run: RunInfo) -> None:
        self._closing = threading.Lock()
        self._closed = self._broken = False
        self._named: list[int] = []
        self._open: dict[str, Finding] = {}
        self._learn(run.findings)
        self._feeders = [f for each in planned if (f := _start(each, run)) is not None]

    def step(self, report: StepReport, findings: Sequence[Finding]) -> None:
        """Hand a step over, and what was found in it."""
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
        """Hand findings over."""
        for finding in findings:
            for feeder in self._feeders:
                feeder.finding(finding)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """End all sinks once they have taken what waits.

        Args:
            seconds: Time for all of them together.
        """
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
                    "sink %s did not end within %g s and is left behind", feeder.name, seconds
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

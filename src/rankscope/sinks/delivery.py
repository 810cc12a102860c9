"""Messages about findings over a network: repeated for a minute, and then given up."""

import logging
import shlex
import time
from abc import abstractmethod

from rankscope.bus.finding import Finding, FindingEvent, Severity
from rankscope.sinks.base import NewsSink, sentence

_log = logging.getLogger("rankscope")

PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # seconds before each further try

USER = "RANKSCOPE_SMTP_USER"
PASSWORD = "RANKSCOPE_SMTP_PASSWORD"  # environment variables: the mail server's login

MOST_ALERTS = 20  # alerts of one run; with more, nobody reads them


class DeliverySink(NewsSink):
    """Sends a message for each finding that opens, gets worse or closes.

    A message that fails for now is sent again, after longer and longer pauses; the next finding
    starts anew. A message that is refused for good ends the sink. Findings that were never as
    severe as ``severity`` are left out; of ``alerts``, those that close, and all after 20 events.
    """

    def __init__(self, name: str, severity: Severity, *, alerts: bool) -> None:
        super().__init__(severity)
        self._name = name
        self._alerts = alerts
        self._num_alerts = 0
        self._sleep = time.sleep
        self._warned = False

    def notify(self, finding: Finding, event: FindingEvent) -> None:
        """Send a message about a finding's event; SinkError if it is refused for good."""
        if self._alerts and event is FindingEvent.CLOSED:
            return
        self._num_alerts += 1
        last = self._alerts and self._num_alerts == MOST_ALERTS
        if self._alerts and self._num_alerts > MOST_ALERTS:
            return
        text = f"{self.run.run_dir.name}: {sentence(finding, event)}"
        if self._alerts:
            text += f" More: rankscope report {shlex.quote(str(self.run.run_dir))}"
        if last:
            text += " This is the last alert of this run: further findings are only recorded."
        problem = self._send(finding, event, text)
        if problem and not self._warned:
            self._warned = True
            _log.warning(
                "sink %s could not send %s after %d tries (%s); it goes on with the next "
                "finding, and this warning is not repeated",
                self._name,
                finding.id,
                1 + len(PAUSES),
                problem,
            )

    @abstractmethod
    def attempt(self, finding: Finding, event: FindingEvent, text: str) -> str:
        """Send once; return what went wrong for now, or nothing; SinkError if it is for good."""

    def _send(self, finding: Finding, event: FindingEvent, text: str) -> str:
        """Send with retries; return the last problem, empty after success."""
        problem = self.attempt(finding, event, text)
        for pause in PAUSES:
            if not problem:
                break
            self._sleep(pause)
            problem = self.attempt(finding, event, text)
        return problem

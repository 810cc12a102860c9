"""Hang detection at the root: looks once a second, requests stacks, keeps the findings."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from rankscope.agent.hang_report import CodePlace, HangReport, ProcessState, Stack
from rankscope.agent.hangs import HangWatch, hang_finding
from rankscope.bus.finding import Finding

_log = logging.getLogger("rankscope")

_LOOK_SECONDS = 1.0


class Hosts(Protocol):
    """The processes of all ranks, on all hosts."""

    def request_states(self) -> None:
        """Request the states of processes on other hosts."""

    def states(self) -> Mapping[int, ProcessState]:
        """Return the known states of processes, by rank."""

    def marks(self) -> Mapping[int, CodePlace]:
        """Return the known places of ranks inside their steps."""

    def ending(self, rank: int) -> str:
        """Return how a rank ended whose connection was lost, as far as known."""

    def write_line(self, line: str) -> None:
        """Write a line to the error stream of the training, even while it hangs."""

    def take_stacks(self) -> None:
        """Start taking stacks on all hosts."""

    def stacks(self) -> Mapping[int, Stack] | None:
        """Return stacks by rank, once some have arrived."""


class HangNotes:
    """Detects the hangs of one run; ``notify`` gets each finding that opens, changes or closes.

    A step may take ``hang_seconds``, or 20 typical steps if that is more.
    """

    def __init__(
        self,
        num_workers: int,
        hang_seconds: float,
        hosts: Hosts,
        notify: Callable[[Finding], None],
    ) -> None:
        self._watch = HangWatch(num_workers, hang_seconds)
        self._hosts = hosts
        self._notify = notify
        self._report: HangReport | None = None
        self._stacks: Mapping[int, Stack] = {}
        self._next_look = 0.0
        self.findings: dict[str, Finding] = {}

    def observe(self, rank: int, step: int) -> None:
        """Record that a rank has delivered a step; −1 for its hello frame."""
        self._watch.observe(rank, step, time.monotonic())

    def leave(self, rank: int) -> None:
        """Record that a rank closed its scope normally."""
        self._watch.leave(rank)

    def look(self, newest: int) -> None:
        """Check all ranks, once a second; ``newest`` is the newest step in the record."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        if self._watch.wants_states(now):
            self._hosts.request_states()
        report = self._watch.look(now, self._hosts.states(), self._hosts.marks())
        if report is not None and not report.recovered:
            self._hosts.take_stacks()
            self._stacks = {}
        stacks = self._hosts.stacks()
        if stacks:
            self._stacks = {**self._stacks, **stacks}
            report = self._watch.learn(self._stacks) or report
        if report is not None:
            self._note(report, newest)

    def _note(self, report: HangReport, newest: int) -> None:
        finding = hang_finding(report, self._stacks, newest=newest)
        if finding is None:
            _log.info("%s", report)
        else:
            self.findings[finding.id] = finding
            self._notify(finding)
            self._hosts.write_line(finding.explanation)

"""What the root notes of hangs: it looks once a second, asks for stacks, and keeps the findings."""

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
    """The processes of all ranks, wherever they are."""

    def ask(self) -> None:
        """Have other hosts look at their processes."""

    def states(self) -> Mapping[int, ProcessState]:
        """Return how the processes are, as far as is known."""

    def marks(self) -> Mapping[int, CodePlace]:
        """Return where the ranks are inside of their steps, as far as is known."""

    def ending(self, rank: int) -> str:
        """Return what became of a rank whose connection was lost, as far as that is known."""

    def say(self, line: str) -> None:
        """Write a line where the training's warnings go, though it stands still."""

    def take_stacks(self) -> None:
        """Begin to take stacks, on all hosts."""

    def stacks(self) -> Mapping[int, Stack] | None:
        """Return stacks by rank, once some have come."""


class HangNotes:
    """Notices hangs of one run.

    Args:
        num_workers: W.
        hang_seconds: How long a step may take; 20 typical steps if that is more.
        hosts: Where to look.
        tell: Called with each finding that opens, changes or closes.
    """

    def __init__(
        self,
        num_workers: int,
        hang_seconds: float,
        hosts: Hosts,
        tell: Callable[[Finding], None],
    ) -> None:
        self._watch = HangWatch(num_workers, hang_seconds)
        self._hosts = hosts
        self._tell = tell
        self._report: HangReport | None = None
        self._stacks: Mapping[int, Stack] = {}
        self._next_look = 0.0
        self.findings: dict[str, Finding] = {}

    def observe(self, rank: int, step: int) -> None:
        """Note that a rank has delivered a step; −1 for its greeting."""
        self._watch.observe(rank, step, time.monotonic())

    def leave(self, rank: int) -> None:
        """Note that a rank ended its watch in good order."""
        self._watch.leave(rank)

    def look(self, newest: int) -> None:
        """Look at all ranks, once a second.

        Args:
            newest: The newest step that the record has.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        if self._watch.wants_states(now):
            self._hosts.ask()
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
            self._tell(finding)
            self._hosts.say(finding.explanation)

"""Frames from the agent: read between two steps, findings delivered at the beginning of one."""

import contextlib
import json
import logging
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rankscope.agent.frames import Frame, FrameKind
from rankscope.agent.link import AgentEndedError, Link
from rankscope.agent.rank_processes import permit_inspection
from rankscope.agent.step_message import unpack_report, untag
from rankscope.bus.finding import Finding
from rankscope.bus.step import StepReport
from rankscope.bus.words import TRACE
from rankscope.record.stores import Store
from rankscope.session.collector import StepCollector
from rankscope.session.opening import RunHandle
from rankscope.sinks import Sinks

_log = logging.getLogger("rankscope")


def announce(level: int, line: str) -> None:
    """Print a line on the error stream, even below warning, unless the logger has a level."""
    line = f"rankscope: {line}"
    if _log.level != logging.NOTSET:
        _log.log(level, "%s", line)
    elif not _log.disabled:
        _log.handle(_log.makeRecord(_log.name, level, __file__, 0, "%s", (line,), None))


def place_of(run_dir: Path, store: Store | None) -> str:
    """Return the place of a run as the user may name it, perhaps in an object store."""
    with contextlib.suppress(OSError, ValueError):  # outside the working directory, or none exists
        run_dir = run_dir.relative_to(Path.cwd())
    return str(store or run_dir)


class WatchedPart(NamedTuple):
    """The part of a training that was watched until the monitor switched itself off."""

    last_sent: int  # the last step that ended before; -1 without one
    last_recorded: int  # the last step on record; -1 without one

    def __str__(self) -> str:
        off = "the monitor switched itself off"
        when = f"{off} after step {self.last_sent:,}" if self.last_sent >= 0 else off
        if self.last_recorded < 0:
            return f"{when}, and no step is recorded"
        return (
            f"{when}, and the record ends with step {self.last_recorded:,}: nothing later is in it"
        )


def last_line(
    place: str,
    judged: bool,
    recorded: bool,
    begun: bool = True,
    watched: WatchedPart | None = None,
) -> str:
    """Return the last line of a run: its place, and the command that shows it.

    ``judged``: its last steps were, before the training ended; ``recorded``: all of it could be
    written; ``begun``: a step has ended; ``watched``: what was watched, if not all of it.
    """
    if not begun:
        return f"nothing is recorded in {place}: the training ended before its first step had"
    shows = f"rankscope report {shlex.quote(place)}"
    if watched is not None and recorded >= judged:
        return f"{watched}; to see what there is: {shows}"
    if not judged:
        return (
            "the last steps were not judged before the training ended; to see all, once the agent "
            f"has closed the record: {shows}"
        )
    if not recorded:
        return f"the run could not be recorded to its end in {place}; to see what was: {shows}"
    return f"the run is recorded in {place}; to see it: {shows}"


def crash_line(place: str) -> str:
    """Return the line of a training that an error has ended, before the run is written."""
    return (
        f"the training ended with an error; to see its run: rankscope report {shlex.quote(place)}"
    )


OnFinding = Callable[[Finding], None]

SLOW_SECONDS = 1.0  # seconds in ``on_finding`` after which a warning is logged
REPORT_SECONDS = 10.0  # seconds that ``Inbox.await_report`` waits: a rank may have ended


class Inbox:
    """Handles the agent's frames in the training's own thread, without waiting for them."""

    def __init__(
        self,
        link: Link,
        handle: RunHandle,
        collector: StepCollector,
        on_finding: OnFinding | None,
        sinks: Sinks | None,
    ) -> None:
        self._link = link
        self._handle = handle
        self._collector = collector
        self._on_finding = on_finding
        self._sinks = sinks
        self._awaits_invitation = handle.awaits_invitation
        self._subscribed = self._notifying = self._warned_slow = False
        self._patience = REPORT_SECONDS
        self._packed: bytes | None = None
        self._latest: StepReport | None = None
        self._due: list[tuple[int, Finding]] = []  # with the step from which on_finding gets each
        self._for_sinks: list[Finding] = []  # for the sinks of this process
        self._last_fed = -1
        self.findings: dict[str, Finding] = {}  # all findings by id, each in its latest state
        self.done = False  # whether the agent has sent its last frame
        self.recorded = False  # whether it could write all of the run, by that frame
        self._handlers: dict[int, Callable[[Frame], None]] = {
            FrameKind.WELCOME: lambda frame: permit_inspection(int(frame.payload)),
            FrameKind.INTERVAL: lambda f: collector.intervals.add(f.step, int(f.payload)),
            FrameKind.FINDINGS: self._handle_findings,
            FrameKind.LATEST: self._handle_report,
            FrameKind.LOG: self._handle_line,
            FrameKind.ANNOUNCE: lambda frame: announce(*json.loads(frame.payload)),
            FrameKind.OFF: self._handle_off,
            # published to the agents of other hosts
            FrameKind.INVITATION: lambda f: handle.meeting.write("invitation", f.payload),
            FrameKind.DONE: self._handle_done,
            FrameKind.REQUEST: self._handle_request,
        }

    @property
    def latest(self) -> StepReport | None:
        """The latest report."""
        if self._packed is not None:
            packed = self._packed
            self._packed = None
            self._latest = unpack_report(packed)
        return self._latest

    def read(self) -> None:
        """Handle the frames that have arrived."""
        if self._awaits_invitation:
            invitation = self._handle.meeting.look("invitation")
            if invitation is not None:  # is published, by the root
                self._awaits_invitation = False
                self._link.send(FrameKind.INVITATION, invitation, rank=self._handle.rank)
        self._handle_all(self._link.poll())

    def wait(self, seconds: float) -> bool:
        """Wait up to so many seconds for frames, and handle them; return whether any came."""
        frames = self._link.wait(seconds)
        self._handle_all(frames)
        return bool(frames)

    def subscribe(self) -> None:
        """Request the report of each step from now on, and handle the frames that have arrived."""
        if not self._subscribed:
            self._subscribed = True
            self._link.send(FrameKind.SUBSCRIBE, rank=self._handle.rank)
        self.read()

    def await_report(self, step: int) -> None:
        """Wait until the root has judged a step; after one timeout, never again."""
        self.subscribe()
        until = time.monotonic() + self._patience
        while not self.done and (self.latest is None or self.latest.step < step):
            left = until - time.monotonic()
            if left <= 0:
                self._patience = 0.0
                return
            self.wait(min(left, 0.1))  # and send waiting frames

    def notify(self, step: int | None) -> None:
        """Call ``on_finding`` with the findings due at a step, the same on all ranks; None: all."""
        if not self._due or self._notifying:
            return
        due = [finding for at, finding in self._due if step is None or at <= step]
        self._due = [(at, f) for at, f in self._due if step is not None and at > step]
        self._notifying = True
        try:
            for finding in due:
                self._call_on_finding(finding)
        finally:
            self._notifying = False

    def close_sinks(self) -> None:
        """Pass the last findings to the sinks of this process, and close them."""
        if self._sinks is not None:
            self._sinks.findings(self._take_for_sinks())
            self._sinks.close()

    def _call_on_finding(self, finding: Finding) -> None:
        if self._on_finding is None:
            return
        began = time.monotonic()
        try:
            self._on_finding(finding)
        except Exception:
            _log.exception("on_finding raised for %s; training and monitor go on", finding.id)
        seconds = time.monotonic() - began
        if seconds > SLOW_SECONDS and not self._warned_slow:
            self._warned_slow = True
            _log.warning(
                "on_finding took %.1f s for %s on rank %d, and the training waited for it: it is "
                "called between two steps. This warning is not repeated",
                seconds,
                finding.id,
                self._handle.rank,
            )

    def _handle_all(self, frames: list[Frame]) -> None:
        for frame in frames:
            handler = self._handlers.get(frame.kind)
            if handler is not None:
                handler(frame)

    def _handle_request(self, frame: Frame) -> None:
        name, content = untag(frame.payload)
        self._collector.on_request(name, frame.step, content)

    def _handle_findings(self, frame: Frame) -> None:
        content = json.loads(frame.payload)
        events = content["events"] or [None] * len(content["findings"])
        for values, event in zip(content["findings"], events, strict=True):
            finding = Finding.from_json(values)
            self.findings[finding.id] = finding
            if event is not None:
                self._due.append((frame.step, finding))
            if content["news"] and self._sinks is not None:
                self._for_sinks.append(finding)

    def _handle_report(self, frame: Frame) -> None:
        self._packed = frame.payload
        if self._sinks is not None:
            report = unpack_report(frame.payload)
            if report.step > self._last_fed:
                self._last_fed = report.step
                self._sinks.step(report, self._take_for_sinks())

    def _take_for_sinks(self) -> list[Finding]:
        """Return the findings for sinks since the last call."""
        found, self._for_sinks = self._for_sinks, []
        if not found:
            return []
        from rankscope.verdict.news import with_causes  # which trainings without sinks do without

        return with_causes(found, self.findings.values())

    def _handle_line(self, frame: Frame) -> None:
        level, line, trace = json.loads(frame.payload)
        _log.log(level, "%s", line, extra={TRACE: trace})

    def _handle_off(self, frame: Frame) -> None:
        raise AgentEndedError(frame.payload.decode())

    def _handle_done(self, frame: Frame) -> None:
        self.done = True
        self.recorded = frame.step == 1
        if frame.payload:
            raise AgentEndedError(frame.payload.decode())

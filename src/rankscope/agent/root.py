"""The root: judges the steps of all workers, writes the record, and sends results to all ranks.

A frame that must take effect on all ranks in the same step has the number of a step that no rank
has reached yet.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankscope.agent.assembly import Assembly, Workers, summarize
from rankscope.agent.frames import ALL_RANKS, GUESTS, Frame, FrameKind, pack
from rankscope.agent.hangs import HangNotes
from rankscope.agent.host_summary import (
    HostAssembly,
    HostSummary,
    JoinedSummaries,
    as_columns,
    summary_layout,
    with_directions,
)
from rankscope.agent.rank_processes import RankProcesses
from rankscope.agent.recorder import Recorder
from rankscope.agent.step_message import StepMessage, pack_report, tag, untag
from rankscope.bus.finding import Finding, FindingEvent, FindingEvents, Severity
from rankscope.bus.messages import Layout
from rankscope.bus.pace import LAG, Governor
from rankscope.bus.probe import DirectedRun, Director
from rankscope.bus.step import MAX_PAIRED_WORKERS, GatheredStep, StepReport
from rankscope.bus.words import name_ranks
from rankscope.errors import RunError
from rankscope.evidence import EVIDENCE
from rankscope.record import Run, RunWriter
from rankscope.record.begin import WriterLock
from rankscope.record.states import START_FILE, read_state
from rankscope.record.stores import Mirror, Store
from rankscope.sinks import RunInfo, Sinks, plan_sinks
from rankscope.verdict.assessment import Sibling, coordinate_of, siblings_of
from rankscope.verdict.coverage import CoverageCount
from rankscope.verdict.diagnosis import diagnosis_of
from rankscope.verdict.news import Announcer, with_causes
from rankscope.verdict.rules import first_sentence

_log = logging.getLogger("rankscope")

MOST_AT_ONCE = 64  # most steps that are judged together

_SENT_SECONDS = 5.0  # that ranks wait for the last files to be sent
_SENT_SECONDS_AFTER_ERROR = 1.5  # the same after an error
_SIBLING_SECONDS = 1.0  # that the verdict waits for the job's other runs, which end together
_LINGER_SECONDS = 300.0  # that the agent's process goes on sending them

Send = Callable[[int, bytes], None]  # sends a frame to a rank, or to all of them


class Root:
    """Assembles, judges and records the steps of one run; ``setup``: see ``session.opening``."""

    def __init__(self, setup: Mapping[str, Any], send: Send, ranks: RankProcesses) -> None:
        layout = Layout.from_json(setup["layout"])
        self._send = send
        self._run_dir = Path(setup["run_dir"])
        self._workers = Workers(layout.num_workers)
        self._layout = layout
        self._host_steps: HostAssembly | None = None
        if layout.num_workers > MAX_PAIRED_WORKERS:
            self._host_steps = HostAssembly(setup["num_local"], layout)
        lean = summary_layout(layout) if self._host_steps is not None else layout
        self._assembly = Assembly(lean, setup["first_step"])
        self._governor = Governor(setup["budget"], setup["every"])
        options = setup["info"].get("options") or {}
        directed = DirectedRun(
            num_workers=layout.num_workers,
            first_step=setup["first_step"],
            run_dir=self._run_dir,
            options=options,
            by_loop=layout.by_loop,
            report=self._report_directed,
        )
        made = {
            each.name: make(directed)
            for each in EVIDENCE
            if (make := each.at_root("make_director")) is not None
        }
        self._directors: dict[str, Director] = {n: d for n, d in made.items() if d is not None}
        self.arrived = -1  # the newest step that has come here, though it may not be taken yet
        self._relays = bool(setup["relays"])
        self._latest: StepReport | None = None
        self._saves_state = True
        self._unmeasured: Mapping[str, str] = setup["info"].get("unmeasured") or {}
        self.finished = False
        run = Run.open(self._run_dir)
        self._diagnosis = diagnosis_of(run)
        self._coverage = CoverageCount(run.info.get("training"), run.num_workers)
        start = read_state(self._run_dir / START_FILE) if "continues" in run.info else None
        if start is not None:
            self._diagnosis.restore(start)
        info = {**setup["info"], "agent": {"host": setup["host"], "pid": os.getpid()}}
        self._record = Recorder(
            RunWriter(self._run_dir, info, flush_seconds=setup["flush_seconds"], begun=True)
        )
        self._lock = WriterLock(self._run_dir)
        self._record.flush()  # run.json now has the id of this process
        store = Store.of(setup.get("store", ""))
        self._mirror = None if store is None else Mirror(self._run_dir, store)
        known = tuple(self._diagnosis.findings)
        self._record.add_findings(known)
        seconds = math.inf if setup["hang_seconds"] is None else setup["hang_seconds"]
        self._hangs = HangNotes(layout.num_workers, seconds, ranks, self._report_hang)
        self._ranks = ranks
        info = setup["info"]
        self._sinks = Sinks(
            plan_sinks(setup["sinks"]),
            RunInfo(self._run_dir, len(info["ranks"]), info["config"], info["options"], known),
        )
        self._events = FindingEvents(known)
        self._announcer: Announcer | None = None
        if setup["announce"]:
            self._announcer = Announcer(self._announce, coordinate_of(setup["info"]))
        self._options = options
        self._send(ALL_RANKS, _findings_frame(known))

    # Incoming frames ---------------------------------------------------------------------------

    def take(self, rank: int, frame: Frame | None, at: float) -> None:
        """Handle a frame of a rank; None: its connection has ended."""
        if rank >= GUESTS:
            if frame is not None and frame.kind == FrameKind.EVIDENCE:
                self._pass_to_director(None, frame)
        elif frame is None:
            self._workers.leave(rank, self._ranks.ending(rank), at)
        elif frame.kind == FrameKind.SUMMARY:
            self._handle_summary(frame.payload)
        elif frame.kind == FrameKind.HELLO:
            self._handle_hello(rank)
        elif self._workers[rank].left is None:
            self._take_from_worker(rank, frame, at)

    def _handle_hello(self, rank: int) -> None:
        """Send the present state to a rank, also after it has reconnected."""
        self._hangs.observe(rank, -1)
        if self._governor.decisions:
            self._send(rank, self._interval_frame())
        self._send(rank, _findings_frame(self._findings))

    def _take_from_worker(self, rank: int, frame: Frame, at: float) -> None:
        worker = self._workers[rank]
        if frame.kind == FrameKind.STEP:
            self._handle_step(rank, StepMessage.unpack(frame.payload))
        elif frame.kind == FrameKind.EVIDENCE:
            self._pass_to_director(rank, frame)
        elif frame.kind == FrameKind.SUBSCRIBE:
            worker.wants_reports = True
            if self._latest is not None:
                self._send(rank, pack(FrameKind.LATEST, pack_report(self._latest), rank=rank))
        elif frame.kind == FrameKind.BYE:
            bye = json.loads(frame.payload)
            worker.complete = bool(bye["complete"])
            worker.without_room = int(bye.get("without_room", 0))
            self._hangs.leave(rank)
            self._workers.leave(rank, bye["why"], at)

    def _pass_to_director(self, rank: int | None, frame: Frame) -> None:
        """Pass evidence to the director of its kind."""
        name, content = untag(frame.payload)
        if name in self._directors:
            self._directors[name].take(rank, frame.step, content)

    def _handle_step(self, rank: int, message: StepMessage) -> None:
        self._assembly.learn(rank, message)
        if self._host_steps is None:
            self._hangs.observe(rank, message.step)
            self._assembly.add([rank], message)
            return
        summary = self._host_steps.add(rank, message)
        if summary is not None:
            self._handle_summary(summary)

    def _handle_summary(self, content: bytes) -> None:
        """Add a step of all ranks of a host; beyond 64 workers."""
        summary = HostSummary.unpack(content)
        for rank in summary.ranks_w.tolist():
            self._hangs.observe(rank, summary.step)
        self._assembly.add(summary.ranks_w, summary)

    @property
    def _findings(self) -> tuple[Finding, ...]:
        hangs = self._hangs.findings.values()
        directed = [f for each in self._directors.values() for f in each.findings.values()]
        return (*self._diagnosis.findings, *directed, *hangs)

    # Judging --------------------------------------------------------------------------------

    def work(self) -> bool:
        """Judge complete steps; return whether there may be more of them."""
        steps = self._assembly.take(MOST_AT_ONCE)
        if steps:
            self._judge(steps)
            self._send_reports()
            for rank in self._workers.left:  # they wait for the end of the run
                self._send(rank, pack(FrameKind.WORKING, rank=rank))
        elif not self.finished:
            self._end_if_workers_left()
        return len(steps) == MOST_AT_ONCE

    def idle(self) -> None:
        """Check for hangs, and flush the record if due."""
        if self.finished:
            return
        self._hangs.look(self._assembly.next_step - 1)
        if self._record.flush_if_due():
            self._save_state()

    def _report_hang(self, finding: Finding) -> None:
        self._record.flush()
        self._record.add_findings([finding])
        self._sinks.findings(with_causes([finding], self._findings))
        self._notify([finding], announced=False)  # the local agent has written it

    def _report_directed(self, finding: Finding) -> None:
        """Report a finding of a director; log it even if it is a note."""
        self._record.add_findings([finding])
        self._sinks.findings(with_causes([finding], self._findings))
        self._notify([finding])
        if self._announcer is not None and finding.severity is Severity.NOTE:
            self._announce(first_sentence(finding), False)

    def _judge(self, steps: Sequence[Sequence[Any]]) -> None:
        """Record and judge consecutive steps."""
        reports = [summarize(self._gathered(sent)) for sent in steps]
        self._record.add_many(reports)  # first, in case a detector fails
        found = self._diagnosis.observe_many(reports)
        for report, findings in zip(reports, found, strict=True):
            if self._coverage.add(report):
                self._record.describe(joined=self._coverage.joined)
            self._record.add_findings(findings)
            self._publish(report, findings)

    def _gathered(self, sent: Sequence[Any]) -> GatheredStep:
        interval = self._governor.interval_at(sent[0].step)
        if self._host_steps is None:
            return self._assembly.step_of(as_columns(sent), interval)
        hosts = JoinedSummaries(sent)
        gathered = self._assembly.step_of(hosts.messages, interval)
        return with_directions(gathered, hosts, self._layout)

    def _publish(self, report: StepReport, findings: Sequence[Finding]) -> None:
        """Send a step to sinks and ranks, and derive intervals and requests from it."""
        gathered = report.gathered
        self._sinks.step(report, with_causes(findings, self._findings))
        self._latest = report
        decision = self._governor.observe(
            report.step,
            gathered.observed,
            gathered.workers["overhead_seconds"],
            gathered.workers["step_seconds"],
            self.newest,
            gathered.workers["read_seconds"],
        )
        if decision is not None:
            _log.info("%s", decision)
            self._send(ALL_RANKS, self._interval_frame())
        if self._announcer is not None and (line := self._governor.short_steps(self.newest)):
            self._announce(line, False)
        self._notify(findings)
        known = self._diagnosis.findings
        for name, director in self._directors.items():
            for request in director.observe(gathered, findings, known, self.newest):
                payload = tag(name, request.content)
                self._send(ALL_RANKS, pack(FrameKind.REQUEST, payload, step=request.step))
            if director.unmeasured is not None:
                self._note_unmeasured(name, director)
        if self._relays:
            self._send(0, pack(FrameKind.LATEST, pack_report(report), rank=0))

    def _note_unmeasured(self, name: str, director: Director) -> None:
        """Record why a kind of evidence measures nothing, or that it does."""
        why, director.unmeasured = director.unmeasured, None
        known = self._unmeasured
        self._unmeasured = {
            **{n: w for n, w in known.items() if n != name},
            **({name: why} if why else {}),
        }
        if self._unmeasured != known:
            self._record.describe(unmeasured=self._unmeasured)

    def _notify(self, findings: Sequence[Finding], *, announced: bool = True) -> None:
        """Send changed findings to all ranks, and announce them."""
        if not findings:
            return
        events = [self._events.of(finding) for finding in findings]
        events = [event if event and event.is_news else None for event in events]
        frame = _findings_frame(findings, events, news=True, step=self.newest + LAG)
        self._send(ALL_RANKS, frame)
        if self._announcer is not None and announced:
            changed = [(f, event) for f, event in zip(findings, events, strict=True) if event]
            self._announcer.announce(changed, self._findings)

    def _announce(self, line: str, is_fault: bool) -> None:
        level = logging.WARNING if is_fault else logging.INFO
        self._send(0, pack(FrameKind.ANNOUNCE, json.dumps([level, line]).encode(), rank=0))

    @property
    def should_flush(self) -> bool:
        """Whether to judge at once: many steps wait, or a rank needs the result."""
        waiting = self._assembly.num_whole >= MOST_AT_ONCE
        return waiting or any(each.left or each.wants_reports for each in self._workers)

    @property
    def newest(self) -> int:
        """The newest step that some rank has delivered."""
        return max(self._assembly.newest, self.arrived)

    def _interval_frame(self) -> bytes:
        last = self._governor.decisions[-1]
        return pack(FrameKind.INTERVAL, str(last.interval).encode(), step=last.first_step)

    def _send_reports(self) -> None:
        wanted = [rank for rank, worker in enumerate(self._workers) if worker.wants_reports]
        if self._latest is None or not wanted:
            return
        content = pack_report(self._latest)
        for rank in wanted:
            if not (self._relays and rank == 0):
                self._send(rank, pack(FrameKind.LATEST, content, rank=rank))

    # The end ----------------------------------------------------------------------------------

    def _end_if_workers_left(self) -> None:
        """End the run once no further step can be complete."""
        left = self._workers.left
        delivered = self._assembly.delivered
        if not left:
            return
        last = min(delivered[rank] for rank in left)
        passed = any(delivered[rank] > last for rank in range(len(delivered)) if rank not in left)
        if passed or len(left) == len(self._workers):
            if not self._workers.are_whole(delivered):
                first = self._workers.ended(delivered)[0]
                self._turn_off(
                    f"{name_ranks([first])} sends nothing after step {delivered[first]}: "
                    f"{self._workers[first].left}",
                    because_of=first,
                )
            self.close()

    def _turn_off(self, why: str, because_of: int = -1) -> None:
        """Stop the recording on all ranks; closed ones get the reason with the last frame."""
        for rank, worker in enumerate(self._workers):
            if worker.left is None:
                self._send(rank, pack(FrameKind.OFF, why.encode(), rank=rank))
            elif worker.complete and rank != because_of:
                worker.end_reason = why

    @property
    def has_closed_here(self) -> bool:
        """Whether some worker has completed its part of the run."""
        return any(worker.complete for worker in self._workers)

    def fail(self, error: BaseException) -> None:
        """End the run after an error in the monitor; the training goes on."""
        foreseen = isinstance(error, RunError)
        self._turn_off(str(error) if foreseen else f"{type(error).__name__}: {error}")
        self.close(failed=True)

    def close(self, *, failed: bool = False) -> None:
        """Close the record, and send the last frames to all ranks."""
        if self.finished:
            return
        self.finished = True
        last: list[Finding] = []
        closed = False
        try:
            if all(worker.complete for worker in self._workers):
                self._hangs.close(self._assembly.next_step - 1)
            last = self._diagnosis.close()
            self._close_record(last, failed)
            closed = True
        except Exception as error:
            level = logging.DEBUG if failed else logging.WARNING  # else logged already
            _log.log(level, "the run in %s could not be closed: %s", self._run_dir, error)
        finally:
            self._lock.release(closed=closed)
            seconds = _SENT_SECONDS if closed else _SENT_SECONDS_AFTER_ERROR
            if self._mirror is not None and not self._mirror.close(seconds):
                _log.warning(
                    "some files of the run are not yet in %s; they stay in %s",
                    self._mirror.address,
                    self._run_dir,
                )
            self._sinks.close()
            self._send_verdict(last)
            for rank, worker in enumerate(self._workers):
                reason = worker.end_reason.encode()
                self._send(rank, pack(FrameKind.DONE, reason, rank=rank, step=int(closed)))

    def linger(self) -> None:
        """Go on sending the last files to an object store; no rank waits for it."""
        if self._mirror is not None:
            self._mirror.close(_LINGER_SECONDS)

    def _close_record(self, last: Sequence[Finding], failed: bool) -> None:
        delivered = self._assembly.delivered
        whole = self._workers.are_whole(delivered)
        complete = whole and not failed
        self._record.add_findings(last)
        self._sinks.findings(with_causes(last, self._findings))
        if self._record.flush() and (whole or not failed):
            self._save_state(at_end=True)
        self._record.close(
            "complete" if complete else "incomplete",
            overhead=self._governor.summary(),
            **({} if complete else {"ended": self._workers.endings(delivered)}),
            **self._missing(),
        )

    def _send_verdict(self, last: Sequence[Finding]) -> None:
        """Send the final findings and the verdict; a failure here must not stop the last frames."""
        try:
            self._notify(last)
            self._send(ALL_RANKS, _findings_frame(self._findings))
            if self._announcer is not None:
                self._announcer.conclude(
                    self._findings,
                    num_steps=self._diagnosis.num_steps,
                    num_workers=len(self._workers),
                    options=self._options,
                    coverage=self._coverage.coverage,
                    siblings=self._siblings(),
                )
            if self._latest is not None:
                self._send(ALL_RANKS, pack(FrameKind.LATEST, pack_report(self._latest)))
        except Exception as error:
            _log.debug("the final findings cannot be sent: %s", error)

    def _siblings(self) -> list[Sibling]:
        """Return the other runs of this job; those that end together with this one have ended."""
        until = time.monotonic() + _SIBLING_SECONDS
        while True:
            siblings = siblings_of(Run.open(self._record.path))
            ended = all(one.status != "running" for one in siblings)
            if ended or time.monotonic() > until:
                return siblings
            time.sleep(0.05)

    def _missing(self) -> dict[str, Any]:
        """Return the lost steps, and the gradients left out, by worker."""
        missing: dict[str, Any] = {}
        if self._assembly.lost:
            missing["lost_steps"] = self._assembly.lost
            missing["lost_of"] = dict(sorted(self._assembly.lost_of.items()))
        left_out = {rank: one.without_room for rank, one in enumerate(self._workers)}
        if any(left_out.values()):
            missing["without_room"] = {rank: number for rank, number in left_out.items() if number}
        return missing

    def _save_state(self, *, at_end: bool = False) -> None:
        """Write the detectors' state; after an error the run goes on without it."""
        if not self._saves_state:
            return
        try:
            self._record.save_state(self._diagnosis.state, at_end=at_end)
        except Exception as error:
            self._saves_state = False
            _log.warning("a restarted job cannot go on from %s: %s", self._run_dir, error)


def _findings_frame(
    findings: Sequence[Finding],
    events: Sequence[FindingEvent | None] = (),
    *,
    news: bool = False,
    step: int = -1,
) -> bytes:
    """Return the frame of findings: ``news`` for sinks, events for ``on_finding`` in ``step``."""
    content = {"events": list(events), "news": news, "findings": [f.to_json() for f in findings]}
    packed = json.dumps(content, default=lambda v: v.tolist() if hasattr(v, "tolist") else str(v))
    return pack(FrameKind.FINDINGS, packed.encode(), step=step)

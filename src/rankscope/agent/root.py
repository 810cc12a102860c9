"""The root: judges the steps of all workers once, writes the record, and answers the probes.

Whatever has to happen on all ranks in the same step travels with the number of a step that no rank
has reached yet.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.agent.assembly import Assembly
from rankscope.agent.canary import CanaryDirector, Outgoing
from rankscope.agent.frames import ALL_RANKS, Frame, Kind, pack
from rankscope.agent.layout import Layout
from rankscope.agent.message import StepMessage
from rankscope.agent.reports import pack_report
from rankscope.core.finding import Finding
from rankscope.core.governor import LAG, Governor
from rankscope.core.summarize import summarize
from rankscope.diagnose.diagnosis import diagnosis_of
from rankscope.errors import RunError
from rankscope.record import Run, RunWriter
from rankscope.record.states import START_FILE, read_state
from rankscope.sinks import RunInfo, Sinks, plan_sinks

if TYPE_CHECKING:
    from rankscope.core.step import StepReport

_log = logging.getLogger("rankscope")

MOST_AT_ONCE = 64
"""Steps that are judged in one go."""

Send = Callable[[int, bytes], None]
"""Sends a frame to a rank, or to all of them."""


@dataclass(slots=True)
class _Worker:
    """What the root knows of one worker.

    Attributes:
        left: Why it sends nothing any more; None while it may.
        complete: Whether it has said that its part of the run is complete.
        ended_at: Unix time at which it left.
        wants_reports: Whether it asked for the steps' reports.
    """

    left: str | None = None
    complete: bool = False
    ended_at: float = 0.0
    wants_reports: bool = False


class Root:
    """Assembles, judges and records the steps of one run.

    Args:
        setup: What rank 0 has told, see :func:`rankscope.opening.setup_of`.
        send: Sends a frame to a rank.
    """

    def __init__(self, setup: Mapping[str, Any], send: Send) -> None:
        layout = Layout.from_json(setup["layout"])
        self._send = send
        self._run_dir = Path(setup["run_dir"])
        self._workers = [_Worker() for _ in range(layout.num_workers)]
        self._assembly = Assembly(layout, setup["first_step"])
        self._governor = Governor(setup["budget"], setup["every"])
        self._canaries = None
        if setup["canary"]:
            every = setup["canary_every"]
            self._canaries = CanaryDirector(layout.num_workers, every=every, run_dir=self._run_dir)
        self._relays = bool(setup["relays"])
        self._latest: StepReport | None = None
        self._saves_state = True
        self.finished = False
        run = Run.open(self._run_dir)
        self._diagnosis = diagnosis_of(run)
        start = read_state(self._run_dir / START_FILE) if "continues" in run.info else None
        if start is not None:
            self._diagnosis.restore(start)
        self._writer = RunWriter(
            self._run_dir, setup["info"], flush_seconds=setup["flush_seconds"], begun=True
        )
        known = tuple(self._diagnosis.findings)
        self._writer.add_findings(known)
        self._sinks = _start_sinks(setup, self._run_dir, known)
        self._tell(known, told=False)

    # What comes in ---------------------------------------------------------------------------

    def take(self, rank: int, frame: Frame | None, at: float) -> None:
        """Take a frame of a rank, or None for the end of its connection."""
        worker = self._workers[rank]
        if frame is None:
            self._leave(worker, "its process ended", at)
        elif frame.kind == Kind.HELLO:
            self._send(rank, self._interval_frame())
            self._send(rank, _findings_frame(self._diagnosis.findings, told=False, step=-1))
        elif worker.left is not None:
            return
        elif frame.kind == Kind.STEP:
            self._assembly.add(rank, StepMessage.unpack(frame.payload))
        elif frame.kind == Kind.BATCH and self._canaries is not None:
            self._direct(self._canaries.batch_arrived(rank, frame.payload))
        elif frame.kind == Kind.BYE:
            said = json.loads(frame.payload)
            worker.complete = bool(said["complete"])
            self._leave(worker, said["why"], at)
        elif frame.kind == Kind.SUBSCRIBE:
            worker.wants_reports = True
            if self._latest is not None:
                self._send(rank, pack(Kind.LATEST, pack_report(self._latest), rank=rank))

    def _leave(self, worker: _Worker, why: str, at: float) -> None:
        if worker.left is None:
            worker.left, worker.ended_at = why, at

    # What is made of it ------------------------------------------------------------------------

    def work(self) -> bool:
        """Judge steps that are whole; return whether there may be more of them."""
        steps = self._assembly.take(MOST_AT_ONCE)
        for messages in steps:
            self._judge(messages)
        if steps:
            self._send_reports()
        elif not self.finished:
            self._see_who_left()
        return len(steps) == MOST_AT_ONCE

    def idle(self) -> None:
        """Write what is due."""
        if not self.finished and self._writer.flush_if_due():
            self._save_state()

    def _judge(self, messages: Sequence[StepMessage]) -> None:
        step = messages[0].step
        gathered = self._assembly.step_of(messages, self._governor.interval_at(step))
        report = summarize(gathered)
        findings = self._diagnosis.observe(report)
        self._writer.add(report)
        self._writer.add_findings(findings)
        if self._sinks is not None:
            self._sinks.step(report, findings)
        self._latest = report
        decision = self._governor.observe(
            step,
            gathered.observed,
            gathered.workers["overhead_seconds"],
            gathered.workers["step_seconds"],
            self._assembly.newest,
        )
        if decision is not None:
            _log.info("%s", decision)
            self._send(ALL_RANKS, self._interval_frame())
        self._tell(findings, told=True)
        if self._canaries is not None:
            known, newest = self._diagnosis.findings, self._assembly.newest
            self._direct(self._canaries.observe(gathered, findings, known, newest))
        if self._relays:
            self._send(0, pack(Kind.LATEST, pack_report(report), rank=0))

    def _direct(self, messages: Sequence[Outgoing]) -> None:
        for message in messages:
            self._send(ALL_RANKS, pack(message.kind, message.payload, step=message.step))

    def _tell(self, findings: Sequence[Finding], *, told: bool) -> None:
        if findings:
            self._send(ALL_RANKS, _findings_frame(findings, told=told, step=self.ahead))

    @property
    def ahead(self) -> int:
        """The number of a step that no rank has begun, as far as is known."""
        return self._assembly.newest + LAG

    def _interval_frame(self) -> bytes:
        changes = [[d.first_step, d.interval] for d in self._governor.decisions]
        return pack(Kind.INTERVAL, json.dumps(changes).encode())

    def _send_reports(self) -> None:
        wanted = [rank for rank, worker in enumerate(self._workers) if worker.wants_reports]
        if self._latest is None or not wanted:
            return
        content = pack_report(self._latest)
        for rank in wanted:
            if not (self._relays and rank == 0):
                self._send(rank, pack(Kind.LATEST, content, rank=rank))

    # How it ends -------------------------------------------------------------------------------

    def _see_who_left(self) -> None:
        """End the run once no further step can be whole."""
        left = [rank for rank, worker in enumerate(self._workers) if worker.left is not None]
        if not left:
            return
        delivered = self._assembly.delivered
        last = min(delivered[rank] for rank in left)
        passed = any(delivered[rank] > last for rank, w in enumerate(self._workers) if not w.left)
        if passed:
            first = min(left, key=lambda rank: self._workers[rank].ended_at)
            self._turn_off(
                f"rank {first} sends nothing after step {delivered[first]}: "
                f"{self._workers[first].left}"
            )
        if passed or len(left) == len(self._workers):
            self.close()

    def _turn_off(self, why: str) -> None:
        for rank, worker in enumerate(self._workers):
            if worker.left is None:
                self._send(rank, pack(Kind.OFF, why.encode(), rank=rank))

    def fail(self, error: BaseException) -> None:
        """End the run after an error of the monitor's own; the training goes on."""
        foreseen = isinstance(error, RunError)
        self._turn_off(str(error) if foreseen else f"{type(error).__name__}: {error}")
        self.close(failed=True)

    def close(self, *, failed: bool = False) -> None:
        """Write all that is known, and tell the probes that it is done."""
        if self.finished:
            return
        self.finished = True
        workers, delivered = self._workers, self._assembly.delivered
        whole = all(w.complete for w in workers) and len(set(delivered)) == 1
        complete = whole and not failed
        try:
            last = self._diagnosis.close()
            self._writer.add_findings(last)
            if self._sinks is not None:
                self._sinks.findings(last)
            self._writer.flush()
            if whole or not failed:
                self._save_state(at_end=True)
            self._writer.close(
                "complete" if complete else "incomplete",
                overhead=self._governor.summary(),
                **({} if complete else {"ended": self._endings()}),
            )
        except Exception as error:
            _log.warning("the run in %s could not be closed: %s", self._run_dir, error)
        finally:
            if self._sinks is not None:
                self._sinks.close()
            self._send(ALL_RANKS, _findings_frame(self._diagnosis.findings, told=False, step=-1))
            if self._latest is not None:
                self._send(ALL_RANKS, pack(Kind.LATEST, pack_report(self._latest)))
            self._send(ALL_RANKS, pack(Kind.DONE))

    def _endings(self) -> list[dict[str, Any]]:
        """Return who ended, the first one first."""
        delivered = self._assembly.delivered
        endings = [
            {"rank": rank, "last_step": delivered[rank], "time": w.ended_at, "why": w.left}
            for rank, w in enumerate(self._workers)
            if w.left is not None
        ]
        return sorted(endings, key=lambda ending: ending["time"])

    def _save_state(self, *, at_end: bool = False) -> None:
        """Write what the detectors remember; if it cannot be told, the run goes on all the same.

        Raises:
            RunError: It cannot be written, as the tables cannot be either.
        """
        if not self._saves_state:
            return
        try:
            self._writer.save_state(self._diagnosis.state, at_end=at_end)
        except RunError:
            raise
        except Exception as error:
            self._saves_state = False
            _log.warning("a restarted job cannot go on from %s: %s", self._run_dir, error)


def _findings_frame(findings: Sequence[Finding], *, told: bool, step: int) -> bytes:
    content = {"told": told, "findings": [finding.to_json() for finding in findings]}
    return pack(Kind.FINDINGS, json.dumps(content, default=_plain).encode(), step=step)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _start_sinks(
    setup: Mapping[str, Any], run_dir: Path, known: tuple[Finding, ...]
) -> Sinks | None:
    if not setup["sinks"]:
        return None
    info = RunInfo(
        run_dir,
        len(setup["info"]["ranks"]),
        setup["info"]["config"],
        setup["info"]["options"],
        known,
    )
    return Sinks(plan_sinks(setup["sinks"]), info)

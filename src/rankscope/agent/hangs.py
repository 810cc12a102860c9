"""Detects that a training hangs, and makes a finding of the ranks that the others wait for.

The root has the last step of each rank. Places inside a step, process states and stacks come from
the agents of the hosts.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from statistics import median

from rankscope.agent.hang_report import (
    CodePlace,
    Fate,
    HangReport,
    ProcessState,
    Stack,
    collective_of,
    judge_collectives,
    judge_hang,
    judge_stacks,
    words_of,
)
from rankscope.agent.rank_processes import RankProcesses
from rankscope.bus.detector import FaultEvidence, finding_of
from rankscope.bus.finding import Finding, FindingEvents, Severity
from rankscope.bus.words import name_ranks
from rankscope.verdict.news import line_of
from rankscope.verdict.rules import first_sentence

_FEWEST_STEPS = 3
_SLOW_STEPS = 20  # median step times that a step may take before it counts as a hang
_LONGEST_GAP = 10.0  # seconds between two looks; after more, the agent itself was held up
_NAMED = 4  # suspects that are described one by one
_SHOWN_STACKS = 16
_SHOWN_CALLERS = 3
_RECORDER_OFF = " With TORCH_FR_BUFFER_SIZE=2000 set at the start, the collective is named here."


class HangWatch:
    """Decides when a step takes too long, and when the hang is over; reports each once.

    A hang begins when no rank has delivered anything new for ``hang_seconds``, or for 20 typical
    steps if that is more. A rank that is behind while others go on, as with local steps, is none.
    """

    def __init__(self, num_workers: int, hang_seconds: float) -> None:
        self._num_workers = num_workers
        self._hang_seconds = hang_seconds
        self._delivered: dict[int, int] = {}
        self._left: set[int] = set()
        self._newest = (-1, 0.0)  # the newest step, and when it was first delivered
        self._moved: float | None = None
        self._looked: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=32)
        self._report: HangReport | None = None
        self._began = 0.0
        self._from: dict[int, int] = {}

    def observe(self, rank: int, step: int, now: float) -> None:
        """Record that a rank has delivered a step (−1: its hello frame), by a monotonic clock."""
        if step <= self._delivered.get(rank, -2):
            return
        self._delivered[rank] = step
        self._moved = now
        newest, when = self._newest
        if step > newest:
            if newest >= 0:
                self._step_seconds.append((now - when) / (step - newest))
            self._newest = (step, now)

    def leave(self, rank: int) -> None:
        """Record that a rank closed its scope normally: no rank waits for it."""
        self._left.add(rank)

    def wants_states(self, now: float) -> bool:
        """Return whether to request states from other hosts: after half the limit."""
        return self._report is not None or self._idle(now) >= self._limit() / 2

    def look(
        self,
        now: float,
        states: Mapping[int, ProcessState],
        marks: Mapping[int, CodePlace] | None = None,
    ) -> HangReport | None:
        """Return a report when a hang begins, gets worse or is over; called about once a second."""
        self._allow_for_own_pause(now)
        there = [
            rank
            for rank in self._delivered
            if rank not in self._left and states.get(rank) != ProcessState.ENDED
        ]
        if self._report is not None:
            return self._follow(now, there, states, marks or {})
        seconds = self._idle(now)
        if not there or seconds < self._limit():
            return None
        report = self._judge(seconds, states, marks or {})
        is_certain = report.phase == "backward" or report.with_fate(Fate.ENDED, Fate.STOPPED)
        if self._newest[0] < 0 and not is_certain:
            return None  # the first step may take long: it compiles
        self._report = report
        self._began = now - seconds
        self._from = dict(self._delivered)
        return report

    def learn(self, stacks: Mapping[int, Stack]) -> HangReport | None:
        """Refine the report of the present hang with stacks by rank; None without a hang."""
        if self._report is not None:
            self._report = judge_collectives(judge_stacks(self._report, stacks), stacks)
        return self._report

    def _follow(
        self,
        now: float,
        there: list[int],
        states: Mapping[int, ProcessState],
        marks: Mapping[int, CodePlace],
    ) -> HangReport | None:
        """Return a report if the hang is over, or has become worse."""
        assert self._report is not None
        ranks = there or self._left
        if ranks and all(self._delivered[rank] > self._from.get(rank, -2) for rank in ranks):
            end = now if self._moved is None else self._moved
            over = replace(self._report, seconds=end - self._began, recovered=True)
            self._report = None
            return over
        report = self._judge(now - self._began, states, marks)
        known = set(self._report.with_fate(Fate.ENDED, Fate.STOPPED))
        if not there or set(report.with_fate(Fate.ENDED, Fate.STOPPED)) <= known:
            return None
        self._report = replace(report, step=self._report.step)
        return self._report

    def _judge(
        self, seconds: float, states: Mapping[int, ProcessState], marks: Mapping[int, CodePlace]
    ) -> HangReport:
        places = {rank: CodePlace(step + 1) for rank, step in self._delivered.items()}
        if all(rank in marks for rank in places):
            places = {rank: marks[rank] for rank in places}
        return judge_hang(seconds, self._num_workers, places, states, self._left)

    def _idle(self, now: float) -> float:
        return 0.0 if self._moved is None else now - self._moved

    def _limit(self) -> float:
        """Return how long a step may take; a median of few steps does not count."""
        known = len(self._step_seconds) >= _FEWEST_STEPS
        typical = median(self._step_seconds) if known else 0.0
        return max(self._hang_seconds, _SLOW_STEPS * typical)

    def _allow_for_own_pause(self, now: float) -> None:
        """Leave out a time in which the agent itself did not run."""
        gap = 0.0 if self._looked is None else now - self._looked
        if gap > _LONGEST_GAP and self._moved is not None:
            self._moved = min(self._moved + gap, now)
        self._looked = now


def hang_finding(
    report: HangReport, stacks: Mapping[int, Stack] | None = None, *, newest: int | None = None
) -> Finding | None:
    """Return the finding of a hang; None for a pause of all ranks together.

    An error if the process of a rank has ended or is stopped while others wait: the training
    cannot recover by itself. Otherwise a warning: a live rank may be busy with something long,
    such as saving a checkpoint alone.

    ``newest`` is the newest step in the record; None: the step before the one that hangs.
    """
    if report.is_pause:
        return None
    shown = _stacks_shown(report, stacks or {})
    is_exact = bool(report.with_fate(Fate.ENDED, Fate.STOPPED))
    severity = Severity.ERROR if is_exact else Severity.WARNING
    ended = "ended only after" if report.recovered else "has not ended for"
    fields = {
        "Course": f"Step {report.step:,} {ended} {report.seconds:,.0f} s",
        "what": _suspect_words(report),
        "stacks": _stack_words(shown, over=report.recovered),
        "collective": _collective_words(report, stacks or {}),
    }
    evidence = FaultEvidence(
        "time.hang",
        severity,
        report.ranks,
        report.step,
        report.step,
        1,
        fields,
        {**_evidence(report, shown), **_collective_evidence(report, stacks or {})},
        status="closed" if report.recovered else "open",
    )
    step = report.step - 1 if newest is None else newest
    return finding_of(evidence, step, name=f"time.hang:step-{report.step}")


def _suspect_words(report: HangReport) -> str:
    over = report.recovered
    if not report.suspects:
        are, does = ("were", "did") if over else ("are", "does")
        return f"all ranks {are} in its backward pass, where the reduction {does} not end"
    parts = [
        f"{name_ranks([one.rank])} {words_of(one, over=over)}" for one in report.suspects[:_NAMED]
    ]
    others = [one.rank for one in report.suspects[_NAMED:]]
    if others:
        parts.append(f"so it {'was' if over else 'is'}, or similar, with {name_ranks(others)}")
    if report.waiting:
        one = len(report.waiting) == 1
        verb = "waited" if report.recovered else "waits" if one else "wait"
        where = f" in the {report.phase} pass" if report.phase in ("forward", "backward") else ""
        parts.append(f"{name_ranks(report.waiting)} {verb}{where}")
    return "; ".join(parts)


def _stacks_shown(report: HangReport, stacks: Mapping[int, Stack]) -> dict[int, Stack]:
    """Return the stacks for the finding, first those of suspects, or of the place they skipped."""
    first = report.waiting if report.with_fate(Fate.AHEAD) else report.ranks
    order = [*first, *sorted(stacks.keys() - set(first))]
    return {rank: stacks[rank] for rank in order[:_SHOWN_STACKS] if rank in stacks}


def _stack_words(stacks: Mapping[int, Stack], *, over: bool) -> str:
    """Describe the place of the first rank, and why others have no stack."""
    for rank, stack in stacks.items():
        if stack["frames"]:
            first, *callers = stack["frames"][: _SHOWN_CALLERS + 1]
            by = f", called by {', '.join(callers)}" if callers else ""
            return f" {name_ranks([rank]).capitalize()} {'was' if over else 'is'} in {first}{by}."
    reasons: Iterable[str] = dict.fromkeys(stack["missing"] for stack in stacks.values())
    return "".join(f" No Python stack: {reason}." for reason in list(reasons)[:1])


def _collective_words(report: HangReport, stacks: Mapping[int, Stack]) -> str:
    """Describe the collective that does not end, or how to have it recorded."""
    if not any("collectives" in stack for stack in stacks.values()):
        return "" if report.recovered or not stacks else _RECORDER_OFF
    found = collective_of(report, stacks)
    if found is None:
        return ""
    return f" By torch's Flight Recorder, {found.words(over=report.recovered)}."


def _collective_evidence(report: HangReport, stacks: Mapping[int, Stack]) -> dict[str, object]:
    found = collective_of(report, stacks)
    if found is None:
        return {}
    calls = list(found.calls.items())[:_SHOWN_STACKS]
    return {
        "collective": f"number {found.number} of {found.group}",
        "calls": {" ".join(call): list(ranks) for call, ranks in calls},
        "ranks_not_in_it": list(found.absent),
        "collectives_differ": found.differs,
    }


def _evidence(report: HangReport, stacks: Mapping[int, Stack]) -> dict[str, object]:
    by_fate: dict[str, list[int]] = {}
    for one in report.suspects:
        by_fate.setdefault(str(one.fate), []).append(one.rank)
    placed = [one for one in report.suspects if one.place is not None][:_SHOWN_STACKS]
    return {
        "seconds": round(report.seconds, 1),
        **by_fate,
        "waiting_ranks": len(report.waiting),
        **{f"place_of_rank_{one.rank}": str(one.place) for one in placed},
        **{
            f"stack_of_rank_{rank}": " ← ".join(stack["frames"]) or stack["missing"]
            for rank, stack in stacks.items()
        },
    }


_log = logging.getLogger("rankscope")

_LOOK_SECONDS = 1.0
_STACKS_SECONDS = 15.0  # that the finding of a hang waits for the stacks of all live ranks


class HangNotes:
    """Detects the hangs of one run; ``notify`` gets each finding that opens, changes or closes.

    A finding waits for the stacks and collectives of all live ranks: without them it may name
    ranks that only wait.
    """

    def __init__(
        self,
        num_workers: int,
        hang_seconds: float,
        ranks: RankProcesses,
        notify: Callable[[Finding], None],
    ) -> None:
        self._watch = HangWatch(num_workers, hang_seconds)
        self._ranks = ranks
        self._notify = notify
        self._stacks: Mapping[int, Stack] = {}
        self._stacks_until = math.inf  # a finding is noted then, with the stacks that are there
        self._next_look = 0.0
        self._events = FindingEvents()
        self.findings: dict[str, Finding] = {}

    def observe(self, rank: int, step: int) -> None:
        """Record that a rank has delivered a step; −1 for its hello frame."""
        self._watch.observe(rank, step, time.monotonic())

    def leave(self, rank: int) -> None:
        """Record that a rank closed its scope normally."""
        self._watch.leave(rank)

    def close(self, newest: int) -> None:
        """Note that a hang is over after which all ranks have closed their scopes."""
        report = self._watch.look(time.monotonic(), self._ranks.states(), self._ranks.marks())
        if report is not None and report.recovered:
            self._note(report, newest)

    def look(self, newest: int) -> None:
        """Check all ranks, once a second; ``newest`` is the newest step in the record."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        if self._watch.wants_states(now):
            self._ranks.request_states()
        states = self._ranks.states()
        report = self._watch.look(now, states, self._ranks.marks())
        if report is not None and report.recovered:
            self._stacks_until = math.inf
            self._note(report, newest)
        elif report is not None:
            self._ranks.take_stacks()
            self._stacks = {}
            self._stacks_until = now + _STACKS_SECONDS
        stacks = self._ranks.stacks()
        self._stacks = {**self._stacks, **(stacks or {})}
        report = self._watch.learn(self._stacks)
        if report is None:
            return
        alive = {rank for rank, state in states.items() if state is not ProcessState.ENDED}
        is_due = alive <= self._stacks.keys() or now >= self._stacks_until
        if self._stacks_until < math.inf and is_due:
            self._stacks_until = math.inf
            self._note(report, newest)
        elif self._stacks_until == math.inf and stacks:
            self._note(report, newest)

    def _note(self, report: HangReport, newest: int) -> None:
        finding = hang_finding(report, self._stacks, newest=newest)
        if finding is None:
            _log.info("%s", report)
        else:
            self.findings[finding.id] = finding
            self._notify(finding)
            event = self._events.of(finding)
            if event is not None:
                is_open = finding.status == "open"
                text = finding.explanation if is_open else first_sentence(finding)
                self._ranks.write_line(line_of(finding, event, text))

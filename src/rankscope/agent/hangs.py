"""Notices that a training hangs, and makes a finding of it: who the others wait for, and where.

The root knows which rank has delivered which step. Places inside of a step, states of processes and
stacks come from the agents of the hosts (:mod:`rankscope.agent.progress`, ``processes``,
``stacks``).
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median

from rankscope.agent.hang_report import (
    CodePlace,
    Fate,
    HangReport,
    ProcessState,
    Stack,
    Standing,
    judge_hang,
    judge_stacks,
    words_of,
)
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.rules import describe
from rankscope.bus.words import name_ranks

_FEWEST_STEPS = 3
_SLOW_STEPS = 20  # median step times that a step may take before it counts as a hang
_LONGEST_GAP = 10.0  # seconds between two looks; if it is more, the agent itself was held up
_NAMED = 4  # suspects whose fate is told one by one
_SHOWN_STACKS = 16
_SHOWN_CALLERS = 3


class HangWatch:
    """Decides when a step takes too long: tells once that it does, and once that it ended.

    A hang begins when no rank has delivered anything new for too long. A rank that is behind while
    others go on without it, as with local steps, holds up nobody.

    Args:
        num_workers: How many ranks deliver.
        hang_seconds: How long a step may take; 20 typical steps if that is more.
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
        """Note that a rank has delivered a step; for every message.

        Args:
            rank: The rank.
            step: The step; −1 for its greeting.
            now: Seconds by a clock that never jumps.
        """
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
        """Note that a rank ended its watch in good order: it is waited for no more."""
        self._left.add(rank)

    def wants_states(self, now: float) -> bool:
        """Return whether it is time to ask other hosts for states and places: half the limit."""
        return self._report is not None or self._idle(now) >= self._limit() / 2

    def look(
        self,
        now: float,
        states: Mapping[int, ProcessState],
        marks: Mapping[int, CodePlace] | None = None,
    ) -> HangReport | None:
        """See whether the training hangs, or goes on again; about once a second.

        Args:
            now: Seconds by the clock of :meth:`observe`.
            states: How each rank's process is; unknown for ranks that are left out.
            marks: Where each rank is inside of its step, as far as known
                (:func:`rankscope.agent.progress.read_mark`).

        Returns:
            A report when a hang begins, when another rank turns out to have ended or to be stopped
            meanwhile, and when it is over.
        """
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
        if self._newest[0] < 0 and not _is_plain(report):
            return None  # the first step may take long: it compiles
        self._report, self._began, self._from = report, now - seconds, dict(self._delivered)
        return report

    def learn(self, stacks: Mapping[int, Stack]) -> HangReport | None:
        """Take stacks by rank; where places told nothing, they may tell who is waited for.

        Returns:
            The report of the hang that lasts, with what is known now; None if none lasts.
        """
        if self._report is not None:
            self._report = judge_stacks(self._report, stacks)
        return self._report

    def _follow(
        self,
        now: float,
        there: list[int],
        states: Mapping[int, ProcessState],
        marks: Mapping[int, CodePlace],
    ) -> HangReport | None:
        """Return a report if the hang is over, or is worse than it looked."""
        assert self._report is not None
        if there and all(self._delivered[rank] > self._from.get(rank, -2) for rank in there):
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
        """Return how long a step may take; one long step among few says nothing yet."""
        known = len(self._step_seconds) >= _FEWEST_STEPS
        typical = median(self._step_seconds) if known else 0.0
        return max(self._hang_seconds, _SLOW_STEPS * typical)

    def _allow_for_own_pause(self, now: float) -> None:
        """Leave out a time in which the agent did not run: it could not read either."""
        gap = 0.0 if self._looked is None else now - self._looked
        if gap > _LONGEST_GAP and self._moved is not None:
            self._moved = min(self._moved + gap, now)
        self._looked = now


def hang_finding(
    report: HangReport, stacks: Mapping[int, Stack] | None = None, *, newest: int | None = None
) -> Finding | None:
    """Return what the record says of a hang.

    An error where the process of a rank has ended or is stopped while others wait: a training
    cannot go on from that by itself. Otherwise a warning: the others do wait, but a rank that is
    alive may be about something that takes long, such as saving a checkpoint alone.

    Args:
        report: The hang, from :meth:`HangWatch.look` or :meth:`HangWatch.learn`.
        stacks: Stacks by rank, if they were taken.
        newest: The newest step that the record has; the step before the one that hangs if None.

    Returns:
        None where nothing accuses anybody: a pause of all ranks together.
    """
    if report.is_pause:
        return None
    shown = _stacks_shown(report, stacks or {})
    is_exact = bool(report.with_fate(Fate.ENDED, Fate.STOPPED))
    severity = Severity.ERROR if is_exact else Severity.WARNING
    fields = {
        "Course": _course(report),
        "what": _what(report),
        "stacks": _stack_words(shown, over=report.recovered),
    }
    explanation, next_check = describe("time.hang", severity, fields)
    step = report.step - 1 if newest is None else newest
    return Finding(
        id=f"time.hang:step-{report.step}",
        cause="time.hang",
        severity=severity,
        ranks=report.ranks,
        first_step=report.step,
        last_step=report.step,
        explanation=explanation,
        next_check=next_check,
        evidence=_evidence(report, shown),
        status="closed" if report.recovered else "open",
        step=step,
    )


def _is_plain(report: HangReport) -> bool:
    """Return whether a hang in the first step, which may compile, is beyond doubt."""
    return report.phase == "backward" or bool(report.with_fate(Fate.ENDED, Fate.STOPPED))


def _course(report: HangReport) -> str:
    waited = f"{report.seconds:,.0f} s"
    if report.recovered:
        return f"Step {report.step:,} ended only after {waited}"
    return f"Step {report.step:,} has not ended for {waited}"


def _what(report: HangReport) -> str:
    over = report.recovered
    if not report.suspects:
        are, does = ("were", "did") if over else ("are", "does")
        return f"all ranks {are} in its backward pass, where the reduction {does} not end"
    told = [f"rank {one.rank} {words_of(one, over=over)}" for one in report.suspects[:_NAMED]]
    others = [one.rank for one in report.suspects[_NAMED:]]
    if others:
        told.append(f"so it {'was' if over else 'is'}, or similar, with {name_ranks(others)}")
    if report.waiting:
        one = len(report.waiting) == 1
        verb = "waited" if report.recovered else "waits" if one else "wait"
        where = f" in the {report.phase} pass" if report.phase in ("forward", "backward") else ""
        told.append(f"{name_ranks(report.waiting)} {verb}{where}")
    return "; ".join(told)


def _stacks_shown(report: HangReport, stacks: Mapping[int, Stack]) -> dict[int, Stack]:
    """Return the stacks that the finding shows: those of suspects first."""
    order = [*report.ranks, *sorted(stacks.keys() - set(report.ranks))]
    return {rank: stacks[rank] for rank in order[:_SHOWN_STACKS] if rank in stacks}


def _stack_words(stacks: Mapping[int, Stack], *, over: bool) -> str:
    """Return where the first rank is, and why others have no stack, as sentences."""
    for rank, stack in stacks.items():
        if stack["frames"]:
            first, *callers = stack["frames"][: _SHOWN_CALLERS + 1]
            by = f", called by {', '.join(callers)}" if callers else ""
            return f" Rank {rank} {'was' if over else 'is'} in {first}{by}."
    reasons: Iterable[str] = dict.fromkeys(stack["missing"] for stack in stacks.values())
    return "".join(f" No Python stack: {reason}." for reason in list(reasons)[:1])


def _evidence(report: HangReport, stacks: Mapping[int, Stack]) -> dict[str, object]:
    by_fate: dict[str, list[int]] = {}
    for one in report.suspects:
        by_fate.setdefault(str(one.fate), []).append(one.rank)
    return {
        "seconds": round(report.seconds, 1),
        **by_fate,
        "waiting_ranks": len(report.waiting),
        **_last_steps(report.suspects),
        **{
            f"stack_of_rank_{rank}": " ← ".join(stack["frames"]) or stack["missing"]
            for rank, stack in stacks.items()
        },
    }


def _last_steps(suspects: Iterable[Standing]) -> dict[str, object]:
    known = [one for one in suspects if one.place is not None][:_SHOWN_STACKS]
    return {f"place_of_rank_{one.rank}": str(one.place) for one in known}

"""When a canary runs, and of whose batch; decided at the root alone, and sent to the workers.

A canary that is decided when step n is the newest one copies its batches in the forward passes of
step n + 16 or later. It runs before the first forward pass of a step that is again 16 or more ahead
of the arrival of both batches. A worker that receives the message too late answers by how much;
then all run the same batches later, further ahead each time, until all have run them. The first
canary on schedule needs no announcement, since the root may still be starting.

The root announces a canary (:class:`CanaryRequest`); the suspect and the peer answer
(:class:`CanaryAnswer`); the root sends both batches to all. Results are part of their step's
message. Nothing is ever pickled.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rankscope.bus.finding import OFTEN, TIMES_LATELY, Finding
from rankscope.bus.pace import LAG, PACE
from rankscope.bus.shares import Packable
from rankscope.bus.step import GatheredStep
from rankscope.stats.arrays import MISSING_INT

FIRST_KEPT = PACE.first_kept
"""Steps until the batches of a run's first canary are kept."""

SPACING = PACE.canary_spacing
"""Steps between two canaries of findings, or of a schedule within a share, at least."""

RETRY_AFTER = PACE.canary_retry
"""Steps until a canary that some worker missed is tried again."""

SHARE = PACE.canary_share
"""Of the training's time, for canaries that nobody asked for."""

_MOST_BACKING_OFF = 4  # of the wait, by factors of four


class Schedule:
    """When canaries run without a finding: every so many steps, or within a share of time.

    Within a share there is one canary at the beginning, and after one of c seconds the next is due
    when c/share seconds have passed. After failures, the wait grows.
    """

    def __init__(self, every: int | None = None) -> None:
        self._every = every  # steps from one canary to the next; None: nobody asked for a schedule
        self.by_default = every is None  # nobody asked for it
        self._cost = self._since = 0.0
        self._not_before = self._failures = 0

    def see(self, seconds: float) -> None:
        """Add the time of a step."""
        self._since += seconds

    def due(self, step: int) -> bool:
        """Return whether a canary is due now."""
        if self._every is not None:
            return step % self._every == 0
        return step >= self._not_before and SHARE * self._since >= self._cost

    def ended(self, step: int, cost: float, *, failed: bool) -> None:
        """Note the end of a canary, and the seconds that it took."""
        self._since = 0.0
        self._cost = cost
        self._failures = self._failures + 1 if failed else 0
        backing_off = min(self._failures, _MOST_BACKING_OFF)
        self._not_before = step + (RETRY_AFTER << 2 * (backing_off - 1) if failed else SPACING)


TRIGGERS = frozenset({"data.worker_outlier", "compute.worker_outlier", "inconclusive"})
"""Causes of statistical findings that a canary can explain."""


SCHEDULED = "scheduled"
ASKED_FOR = "asked-for"
_NEED_NONE = ("canary-", "amount")  # prefixes of findings on canaries, and on data alone
MOST_LEAD = 2**12
"""Steps that a canary is announced ahead, at most."""

_LEAD_AFTER_FAILURES = 8 * LAG


@dataclass(frozen=True, slots=True)
class Planned(Packable):
    """A canary to come."""

    reason: str  # id of the finding behind it, ``scheduled`` or ``asked-for``
    suspect: int  # rank whose batch every worker runs twice
    peer: int  # rank whose batch every worker runs once
    capture_at: int  # step whose first batch these two keep
    run_at: int  # step before whose first forward pass every worker runs them
    attempt: int = 1  # 1, or 2 after one that came to nothing
    by_default: bool = False  # nobody asked for it: then it may take nothing but its time

    @property
    def of_finding(self) -> bool:
        """Whether a finding led to it."""
        return self.reason not in (SCHEDULED, ASKED_FOR)

    @property
    def seed(self) -> int:
        """Seed of all random generators in it, equal on all workers."""
        return 0x5EED + self.capture_at


def first_scheduled(first_step: int, *, by_default: bool) -> Planned:
    """Return the first canary on a run's schedule."""
    capture_at = first_step + FIRST_KEPT
    return Planned(SCHEDULED, 0, 1, capture_at, capture_at + LAG, by_default=by_default)


class CanaryPlan:
    """Decides on canaries; processes every step, in order."""

    def __init__(
        self, num_workers: int, schedule: Schedule | None = None, first_step: int = 0
    ) -> None:
        self._num_workers = num_workers  # no canaries with one
        self._schedule = schedule  # when canaries run without a finding; None for never
        self._num_scheduled = 0
        self.lead = LAG
        """Steps ahead of the newest one; more after canaries that workers received too late."""
        self._waiting: list[tuple[int, Planned]] = []  # not before this step
        self._explained: set[str] = set()  # ids of findings that have led to a canary
        self._last = -SPACING
        self._step = 0
        self.current: Planned | None = None
        if schedule is not None and num_workers > 1:
            self._num_scheduled = 1
            self.current = first_scheduled(first_step, by_default=schedule.by_default)

    def observe(
        self,
        step: int,
        findings: Sequence[Finding] = (),  # that opened or changed with it, or came again in it
        *,
        requested: bool = False,  # all workers asked for a canary in it
        newest: int | None = None,  # step that any worker has ended; None if it is this one
        seconds: float = math.nan,  # its wall time; NaN if unknown
    ) -> Planned | None:
        """Process a step; return the canary that it led to, also ``current`` from now on."""
        self._step = step
        if self._num_workers < 2:
            return None
        for finding in findings:
            if _can_be_explained(finding) and finding.id not in self._explained:
                self._explained.add(finding.id)
                self._waiting.append((step, self._of(finding.id, finding.ranks)))
        if self._schedule is not None and math.isfinite(seconds):
            self._schedule.see(seconds)
        if requested:
            self._waiting.append((step, self._of(ASKED_FOR, (0,))))
        elif self.current is None and self._schedule is not None and self._schedule.due(step):
            self._add_scheduled(step, by_default=self._schedule.by_default)
        return self._begin(step, step if newest is None else max(step, newest))

    def run_at(self, newest: int) -> Planned:
        """Set the step of the present canary, whose batches have arrived, and return it.

        ``newest`` is the newest step that any worker has ended.
        """
        assert self.current is not None
        at_least = newest + self.lead
        self.current = replace(self.current, run_at=max(self.current.run_at, at_least))
        return self.current

    def postpone(self, newest: int, late: int) -> Planned:
        """Set a later step for the present canary, whose batches came late, and return it."""
        assert self.current is not None
        self.lead = min(max(2 * self.lead, self.lead + 2 * late), MOST_LEAD)
        return self.run_at(newest)

    def give_up(self, cost: float = 0.0) -> bool:
        """End the canary without results, after ``cost`` seconds; return whether it is retried."""
        planned = self._end(cost, failed=True)
        if planned is None:
            return False
        self.lead = max(self.lead, min(2 * self.lead, _LEAD_AFTER_FAILURES))
        if planned.attempt > 1 or planned.reason == SCHEDULED:
            return False
        again = replace(planned, attempt=planned.attempt + 1)
        self._waiting.append((planned.run_at + RETRY_AFTER, again))
        return True

    def finish(self, cost: float = 0.0) -> None:
        """End the present canary, whose results are known, after ``cost`` seconds."""
        self._end(cost, failed=False)
        self.lead = max(self.lead // 2, LAG)

    def _end(self, cost: float, *, failed: bool) -> Planned | None:
        """End the present canary, if any, and return it."""
        planned = self.current
        self.current = None
        scheduled = planned is not None and planned.reason == SCHEDULED
        if scheduled and self._schedule is not None:
            self._schedule.ended(self._step, cost, failed=failed)
        return planned

    def _add_scheduled(self, step: int, *, by_default: bool) -> None:
        """Add a canary on schedule, with each rank as suspect in turn."""
        if any(planned.reason == SCHEDULED for _, planned in self._waiting):
            return
        planned = self._of(SCHEDULED, (self._num_scheduled % self._num_workers,))
        self._num_scheduled += 1
        self._waiting.append((step, replace(planned, by_default=by_default)))

    def _begin(self, step: int, newest: int) -> Planned | None:
        if self.current is not None:
            return None
        for index, (not_before, planned) in enumerate(self._waiting):
            spaced = not planned.of_finding or step >= self._last + SPACING
            if step < not_before or not (spaced or planned.attempt > 1):
                continue
            del self._waiting[index]
            if planned.of_finding:
                self._last = step
            first = newest + self.lead
            self.current = replace(planned, capture_at=first, run_at=first + self.lead)
            return self.current
        return None

    def _of(self, reason: str, ranks: Sequence[int]) -> Planned:
        suspect = ranks[0]
        others = [(suspect + i) % self._num_workers for i in range(1, self._num_workers)]
        peer = next((rank for rank in others if rank not in ranks), others[0])
        return Planned(reason, suspect, peer, -1, -1)


def all_requested(step: GatheredStep) -> bool | None:
    """Return whether all workers asked for a canary in a step; None if only some did.

    A request has a rank and no results.
    """
    columns = step.workers
    requests_W = (columns["canary_of"] != MISSING_INT) & (columns["canary_digest"] == MISSING_INT)
    if np.all(requests_W):
        return True
    return None if np.any(requests_W) else False


def _can_be_explained(finding: Finding) -> bool:
    if finding.id.startswith(_NEED_NONE) or finding.cause not in TRIGGERS:
        return False
    times = finding.evidence.get(TIMES_LATELY, OFTEN)
    return finding.status == "open" and bool(finding.ranks) and times >= OFTEN


@dataclass(frozen=True, slots=True)
class CanaryAnswer(Packable):
    """A worker's answer to the announcement of a canary."""

    capture_at: int  # planned step of the batch; identifies the canary
    batch: bytes = b""  # as pack_batch packs it; empty if none
    autocast: str = ""  # type of autocast in the training's forward pass; empty without
    versions: Mapping[str, str] = field(default_factory=dict)  # of what the training runs with
    declined: str = ""  # why there is no batch, or no result
    ends: bool = False  # this worker runs no canaries from now on
    step: int = -1  # of the batch; a later one where the announcement came late
    late: int = 0  # steps by which the batches came too late to be run


@dataclass(frozen=True, slots=True)
class CanaryRequest(Packable):
    """The announcement of a canary, or its batches to be run."""

    planned: Planned
    batches: tuple[memoryview, ...] = ()  # the suspect's and the peer's, packed; else none

    @property
    def fits(self) -> bool:
        """Whether it has both batches or none."""
        return len(self.batches) in (0, 2)

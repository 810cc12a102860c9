"""When a canary runs, of whose batch: decided alike on every worker, without a word.

A plan is a pure function of gathered steps and of the findings that they led to, and every worker
is shown the same ones in the same order. A canary that is decided at step s has its batches kept in
the forward passes of step s + 16, sent to all when that step has been gathered, and run before the
first forward pass of step s + 32. In 16 steps even a side channel that lags has caught up. A worker
that learns of it too late leaves its results out; then it is tried once more, later.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rankscope.core.finding import Finding
from rankscope.core.governor import LAG
from rankscope.core.step import MISSING_INT, GatheredStep

SPACING = 200
"""Steps between two canaries of findings, at least."""

RETRY_AFTER = 64
"""Steps until a canary that some worker missed is tried again."""

TRIGGERS = frozenset({"data.worker_outlier", "compute.worker_outlier", "inconclusive"})
"""Causes of statistical findings that a canary can explain."""

SCHEDULED = "scheduled"
ASKED_FOR = "asked-for"
_OWN = "canary"  # how the canary's own findings begin


@dataclass(frozen=True, slots=True)
class Planned:
    """A canary to come.

    Attributes:
        reason: Id of the finding behind it, ``scheduled`` or ``asked-for``.
        suspect: The rank whose batch every worker runs twice.
        peer: The rank whose batch every worker runs once.
        capture_at: The step whose first batch these two keep.
        run_at: The step before whose first forward pass every worker runs them.
        attempt: 1, or 2 when a worker missed the first.
    """

    reason: str
    suspect: int
    peer: int
    capture_at: int
    run_at: int
    attempt: int = 1

    @property
    def of_finding(self) -> bool:
        """Whether a finding led to it."""
        return self.reason not in (SCHEDULED, ASKED_FOR)


class CanaryPlan:
    """Decides on canaries; shown every gathered step, in order, on every worker.

    Args:
        num_workers: W; with one worker there is nobody to compare with.
        every: Steps from one scheduled canary to the next; None for none.
    """

    def __init__(self, num_workers: int, every: int | None = None) -> None:
        self._num_workers = num_workers
        self._every = every
        self._waiting: list[tuple[int, Planned]] = []  # not before this step
        self._known: set[str] = set()
        self._last = -SPACING
        self.current: Planned | None = None

    def observe(
        self, step: int, findings: Sequence[Finding] = (), *, asked: bool = False
    ) -> Planned | None:
        """Take a gathered step.

        Args:
            step: Its number.
            findings: Those that opened or changed with it.
            asked: Whether all workers asked for a canary in it.

        Returns:
            The canary that it led to, if any; also :attr:`current` from now on.
        """
        if self._num_workers < 2:
            return None
        for finding in findings:
            if _can_be_explained(finding) and finding.id not in self._known:
                self._known.add(finding.id)
                self._waiting.append((step, self._of(finding.id, finding.ranks)))
        if asked:
            self._waiting.append((step, self._of(ASKED_FOR, (0,))))
        elif self._every is not None and step % self._every == 0 and self.current is None:
            self._waiting.append((step, self._of(SCHEDULED, (0,))))
        return self._begin(step)

    def give_up(self) -> bool:
        """End the present canary without results; return whether it is tried once more."""
        planned, self.current = self.current, None
        if planned is None or planned.attempt > 1 or planned.reason == SCHEDULED:
            return False
        again = replace(planned, attempt=planned.attempt + 1)
        self._waiting.append((planned.run_at + RETRY_AFTER, again))
        return True

    def finish(self) -> None:
        """End the present canary, whose results are known."""
        self.current = None

    def _begin(self, step: int) -> Planned | None:
        if self.current is not None:
            return None
        for index, (not_before, planned) in enumerate(self._waiting):
            spaced = not planned.of_finding or step >= self._last + SPACING
            if step < not_before or not (spaced or planned.attempt > 1):
                continue
            del self._waiting[index]
            if planned.of_finding:
                self._last = step
            self.current = replace(planned, capture_at=step + LAG, run_at=step + 2 * LAG)
            return self.current
        return None

    def _of(self, reason: str, ranks: Sequence[int]) -> Planned:
        suspect = ranks[0]
        others = [(suspect + i) % self._num_workers for i in range(1, self._num_workers)]
        peer = next((rank for rank in others if rank not in ranks), others[0])
        return Planned(reason, suspect, peer, -1, -1)


def all_asked(step: GatheredStep) -> bool | None:
    """Return whether all workers asked for a canary in a step; None if some did, but not all.

    Who asks names a rank and has no results.
    """
    columns = step.workers
    asks_W = (columns["canary_of"] != MISSING_INT) & (columns["canary_digest"] == MISSING_INT)
    if np.all(asks_W):
        return True
    return None if np.any(asks_W) else False


def _can_be_explained(finding: Finding) -> bool:
    ours = finding.id.startswith(_OWN)
    return bool(finding.cause in TRIGGERS and finding.status == "open" and finding.ranks) and (
        not ours
    )

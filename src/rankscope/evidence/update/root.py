"""Audited updates at the root: collects the workers' shares of a step, and judges them."""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from rankscope.bus.finding import Finding
from rankscope.bus.pace import PACE
from rankscope.bus.packing import PackedError
from rankscope.bus.probe import DirectedRun, Director, Request
from rankscope.bus.step import GatheredStep
from rankscope.evidence.update.compare import judge_update
from rankscope.evidence.update.share import UpdateShare
from rankscope.evidence.update.words import in_words

_log = logging.getLogger("rankscope")

_MOST_STEPS = 4  # that wait for the workers' other messages


class UpdateAudits(Director):
    """Audited updates of one run.

    Args:
        num_workers: W.
        report: Takes each finding.
        silent_steps: Steps that yield no findings, since nobody asked for them.
    """

    def __init__(
        self,
        num_workers: int,
        report: Callable[[Finding], None],
        *,
        silent_steps: Collection[int] = (),
    ) -> None:
        self._num_workers = num_workers
        self._report = report
        self._silent_steps = silent_steps
        self._shares: dict[int, dict[int, UpdateShare]] = {}
        self.findings: dict[str, Finding] = {}

    def take(self, rank: int | None, step: int, content: bytes) -> None:
        """Store a worker's share of a step; it arrives before that step's own message."""
        if rank is None:
            return
        try:
            share = UpdateShare.unpack(content)
        except PackedError as error:
            share = UpdateShare(declined={"": f"what was sent of it cannot be read: {error}"})
        self._shares.setdefault(step, {})[rank] = share
        for late in sorted(self._shares)[:-_MOST_STEPS]:
            del self._shares[late]

    def observe(
        self, step: GatheredStep, changed: Sequence[Finding], known: Sequence[Finding], newest: int
    ) -> Iterable[Request]:
        """Judge the step's update, if it was audited."""
        shares = self._shares.pop(step.step, None)
        if shares is None:
            return ()
        if len(shares) < self._num_workers:
            late = "it was not asked for on all ranks in the same step"
            shares = dict.fromkeys(range(self._num_workers), UpdateShare(declined={"": late}))
        shares_W = [shares[rank] for rank in range(self._num_workers)]
        for finding in in_words(judge_update(shares_W), shares_W, step.step):
            if step.step in self._silent_steps:
                _log.debug("an update that nobody asked to audit: %s", finding)
                continue
            self.findings[finding.id] = finding
            self._report(finding)
        return ()


def make_director(run: DirectedRun) -> UpdateAudits:
    """Return the director of audited updates."""
    requested = run.options.get("verify_at", ())
    silent_steps = {run.first_step + later for later in PACE.references}.difference(requested)
    return UpdateAudits(run.num_workers, run.report, silent_steps=silent_steps)

"""The director of canaries at the root: plans them, forwards batches, and judges results.

It processes every step and every answer of a worker, and returns messages for all workers. It has
no socket and no clock.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rankscope.bus.bundles import ReplayBundle, save_bundle, unpack_batch
from rankscope.bus.canary import (
    CanaryCause,
    CanaryResults,
    judge_step,
    results_of,
)
from rankscope.bus.finding import TIMES_LATELY, Finding
from rankscope.bus.probe import DirectedRun, Director, Request
from rankscope.bus.shares import PackedError
from rankscope.bus.step import GatheredStep
from rankscope.bus.words import name_ranks
from rankscope.errors import RunError
from rankscope.evidence.canary.schedule import (
    SCHEDULED,
    CanaryAnswer,
    CanaryPlan,
    CanaryRequest,
    Planned,
    Schedule,
    all_requested,
)

MAX_BATCH_BYTES = 64 * 2**20
"""Larger batches are not forwarded to all workers."""

_MAX_LATE = 128  # steps that an answer may be late, and four times the lead


class CanaryDirector(Director):
    """Canaries of one run."""

    def __init__(
        self,
        num_workers: int,
        *,
        every: int | None = None,  # None: one at the beginning, and more within a share of the time
        first_step: int = 0,
        run_dir: Path | None = None,  # where replay bundles are saved; None for nowhere
    ) -> None:
        super().__init__()
        self._num_workers = num_workers
        self._run_dir = run_dir
        self._log = logging.getLogger("rankscope").log
        schedule = Schedule(every)
        self._plan = CanaryPlan(num_workers, schedule, first_step)
        self._answers: dict[int, CanaryAnswer] = {}
        self._sent = self._ended = self._announced = self._has_run = False
        self._batches: tuple[memoryview, ...] = ()
        self._late = 0
        self._declined = ""
        self._bundle: ReplayBundle | None = None
        self._findings: Sequence[Finding] = ()
        self._newest = -1

    @property
    def current(self) -> Planned | None:
        """The canary under way, if any."""
        return self._plan.current

    def observe(
        self, step: GatheredStep, changed: Sequence[Finding], known: Sequence[Finding], newest: int
    ) -> list[Request]:
        """Check on the present canary, and decide on the next one."""
        self._findings = known
        self._newest = max(self._newest, newest, step.step)
        if self._ended:
            return []
        planned = self._plan.current
        out = [] if planned is None else self._follow(planned, step)
        requested = all_requested(step)
        if requested is None:
            self._log(
                logging.WARNING,
                f"no canary at step {step.step}: scope.canary() was not called on all ranks in "
                "the same step",
            )
        out += self._send_batches()
        again = [  # their evidence counts how often they came lately
            one for one in known if TIMES_LATELY in one.evidence and one.last_step == step.step
        ]
        new = self._plan.observe(
            step.step,
            [*changed, *again],
            requested=bool(requested),
            newest=self._newest,
            seconds=_largest(step, "step_seconds", math.nan),
        )
        if new is not None:
            self._begin()
            out.append(Request(new.capture_at, CanaryRequest(new).pack()))
        return out

    def take(self, rank: int | None, step: int, content: bytes) -> None:
        """Process a worker's answer; the next step sends the batches."""
        if rank is None:
            return
        try:
            answer = CanaryAnswer.unpack(content)
        except PackedError as error:
            self._log(
                logging.INFO, f"an answer of {name_ranks([rank])} to a canary is lost: {error}"
            )
            return
        if answer.ends:
            self._end(rank, answer.declined)
        planned = self._plan.current
        if planned is None or answer.capture_at != planned.capture_at:
            return
        if self._sent:
            self._late = max(self._late, answer.late)
            if answer.declined:
                self._declined = f"{name_ranks([rank])} could not run it: {answer.declined}"
            return
        if rank not in (planned.suspect, planned.peer):
            return
        if answer.batch and len(answer.batch) <= MAX_BATCH_BYTES:
            self._answers[rank] = answer
        else:
            why = answer.declined or f"{len(answer.batch)} bytes are too many"
            self._give_up(planned, f"{name_ranks([rank])} could not give its batch: {why}")

    def _send_batches(self) -> list[Request]:
        """Send the batches to all workers once both have arrived."""
        planned = self._plan.current
        if planned is None or self._sent or len(self._answers) < 2:
            return []
        answers = self._answers[planned.suspect], self._answers[planned.peer]
        self._answers = {}
        self._sent = True
        self._batches = tuple(memoryview(answer.batch) for answer in answers)
        planned = self._plan.run_at(self._newest)
        try:
            self._bundle = self._make_bundle(planned, answers)
        except PackedError as error:
            self._give_up(planned, str(error))
            return []
        if planned.of_finding:
            self._save()
        return [self._run_request(planned)]

    def _run_request(self, planned: Planned) -> Request:
        return Request(planned.run_at, CanaryRequest(planned, self._batches).pack())

    def _begin(self) -> None:
        """Forget what came of the canary before."""
        self._answers = {}
        self._batches = ()
        self._bundle = None
        self._sent = False
        self._late = 0
        self._declined = ""

    def _follow(self, planned: Planned, step: GatheredStep) -> list[Request]:
        """Judge the present canary, postpone it, or give it up, if it has ended."""
        patience = _MAX_LATE + 4 * self._plan.lead
        if not self._sent:
            if step.step >= planned.capture_at + patience:
                self._give_up(planned, "a worker did not send its batch in time")
            return []
        if step.step < planned.run_at:
            return []
        cost = 0.0
        if step.step == planned.run_at:
            results = results_of(step)
            cost = _largest(step, "canary_seconds", 0.0)
            ranks = planned.suspect, planned.peer
            if results is not None and (results.suspect, results.peer) == ranks:
                self._conclude(planned, step, results, cost)
                return []
        if self._declined or step.step >= planned.run_at + patience:
            self._give_up(planned, self._declined or "a worker had no result", cost)
        elif self._late:
            planned = self._plan.postpone(self._newest, self._late)
            self._late = 0
            return [self._run_request(planned)]
        return []

    def _conclude(
        self, planned: Planned, step: GatheredStep, results: CanaryResults, cost: float
    ) -> None:
        self._plan.finish(cost)
        if not self._has_run:
            self._has_run, self.unmeasured = True, ""
        self._announce(planned, cost)
        verdict = judge_step(step, results, differing=_differing(self._findings, step.step))
        if self._bundle is not None:
            self._bundle = replace(self._bundle, results=results, verdict=verdict)
            if planned.of_finding or verdict.verdict is not CanaryCause.DATA:
                self._save()
        self._begin()

    def _announce(self, planned: Planned, cost: float) -> None:
        """Log that a canary has run; of those on schedule, only the first."""
        later = ""
        if planned.reason == SCHEDULED:
            if self._announced:
                return
            self._announced = True
            later = "; those that follow on schedule are not announced"
        suspect = name_ranks([planned.suspect])
        peer = name_ranks([planned.peer])
        self._log(
            logging.INFO,
            f"before step {planned.run_at} every worker replayed a batch of {suspect} "
            f"twice and one of {peer}: {cost:.2f} s, which do not count as the "
            f"monitor's overhead{later}",
        )

    def _give_up(self, planned: Planned, why: str, cost: float = 0.0) -> None:
        self._begin()
        if not self._has_run:
            self.unmeasured = why
        again = self._plan.give_up(cost)
        if planned.by_default:  # nobody waits for it
            return
        after = ": it will be tried once more" if again else ""
        self._log(logging.INFO, f"the canary for {planned.reason} was given up, since {why}{after}")

    def _end(self, rank: int, why: str) -> None:
        """Run no canaries from now on."""
        if not self._ended:
            self._ended = True
            if not self._has_run:
                self.unmeasured = f"{name_ranks([rank])} runs none: {why}"
            self._log(
                logging.INFO, f"no more canaries in this run: {name_ranks([rank])} answered {why!r}"
            )
        self._plan.give_up()
        self._begin()

    def _make_bundle(
        self, planned: Planned, answers: tuple[CanaryAnswer, CanaryAnswer]
    ) -> ReplayBundle:
        return ReplayBundle(
            reason=planned.reason,
            step=answers[0].step,
            suspect=planned.suspect,
            peer=planned.peer,
            num_workers=self._num_workers,
            seed=planned.seed,
            autocast=answers[0].autocast,
            batches=(unpack_batch(answers[0].batch), unpack_batch(answers[1].batch)),
            finding=next((f for f in self._findings if f.id == planned.reason), None),
            versions=answers[0].versions,
        )

    def _save(self) -> None:
        if self._run_dir is None or self._bundle is None:
            return
        try:
            save_bundle(self._run_dir, self._bundle)
        except RunError as error:
            self._log(logging.WARNING, f"a replay bundle is lost: {error}")


def _largest(step: GatheredStep, name: str, otherwise: float) -> float:
    """Return the largest of the workers' values, or ``otherwise`` if none has one."""
    values_W = step.workers[name]
    finite = values_W[np.isfinite(values_W)]
    return float(finite.max()) if finite.size else otherwise


def _differing(findings: Sequence[Finding], step: int) -> tuple[int, ...]:
    """Return the workers that hold other state, by the diagnosis of this canary."""
    for finding in findings:
        if finding.last_step == step and finding.evidence.get("verdict") == str(CanaryCause.STATE):
            return finding.ranks
    return ()


def make_director(run: DirectedRun) -> CanaryDirector | None:
    """Return the director of canaries; None in a run without them."""
    if not run.options.get("canary"):
        return None
    every = run.options.get("canary_every")
    return CanaryDirector(
        run.num_workers, every=every, first_step=run.first_step, run_dir=run.run_dir
    )

"""The detector of restarts that do not go on with the data where the job was interrupted."""

import math
from collections.abc import Iterable

import numpy as np

from rankscope.core.arrays import Ints
from rankscope.core.finding import Severity
from rankscope.core.resume import RestartWatch, Resumption
from rankscope.core.state import Stateful
from rankscope.core.step import GatheredStep
from rankscope.diagnose.evidence import Evidence, Observation
from rankscope.diagnose.rules import count, name_ranks

FROM_START, DONE_TWICE = "epoch-begun-again", "steps-done-twice"
"""Keys of the findings whose words differ from those of ``data.resume_mismatch``."""


class ResumeMismatch(Stateful):
    """After a restart, samples that the interrupted epoch had drawn come again before its rest.

    A restart is known from ``close``: a step after it belongs to a job that continues this one,
    whether this object goes on or another that was restored from its state.

    - In another order, it is an error: the loader shuffled again.
    - All steps of the epoch in the same order: the loader was not advanced, or the whole job went
      back to a checkpoint from the epoch's start. The learning rate tells, where it changes.
    - The last few steps in the same order: the checkpoint was a little older than the last step.
      That is a note.

    Args:
        num_workers: W.
        capacity: Different samples to remember; beyond it, a random share of them is followed.
    """

    SETTINGS = ("_ahead",)

    _ahead: list[Ints] | None
    """Of the steps that are handled together."""

    def __init__(self, num_workers: int, capacity: int = 1 << 18) -> None:
        self._watch = RestartWatch(num_workers, capacity)
        self._ahead = None
        self._ended = False
        self._epoch = -1
        self._lr_by_step: dict[int, float] = {}
        self._lr_before = self._lr_after = self._lr_at_start = math.nan
        self._lr_last = math.nan

    def observe(self, step: Observation) -> Iterable[Evidence]:
        """Take the samples of one step; speaks when it shows how a restarted job went on."""
        gathered = step.gathered
        if self._ended:
            self.restarted(gathered.step)
        lr = _largest(step)
        if gathered.step == self._watch.boundary:
            self._lr_after = lr
        if step.index == 0:
            numbers = [one.step for one in step.stretch.steps]
            self._ahead = self._watch.observe_many(numbers, step.stretch.samples)
        verdict = None
        if self._ahead is None:
            verdict = self._watch.observe(gathered.step, gathered.samples)
        else:
            drawn = int(step.stretch.samples.lengths[step.index])
            self._watch.follow(gathered.step, drawn, self._ahead[step.index])
        self._remember(gathered.step, lr)
        return () if verdict is None else (self._evidence(verdict, gathered),)

    def close(self) -> Iterable[Evidence]:
        """End the run; a step after this is one of a restarted job."""
        self._ended = True
        return ()

    def restarted(self, step: int) -> None:
        """Take ``step`` as the first one of a restarted job."""
        self._ended = False
        self._watch.restart(step)
        self._lr_at_start = self._lr_by_step.get(self._watch.interrupted, math.nan)
        self._lr_before = self._lr_last

    def _remember(self, step: int, lr: float) -> None:
        """Keep the learning rate of the epoch's first step, which is known a little later."""
        self._lr_last = lr
        self._lr_by_step[step] = lr
        epoch = self._watch.epoch
        for old in [s for s in self._lr_by_step if s != epoch and not step - 8 <= s <= step]:
            del self._lr_by_step[old]

    def _severity(self, verdict: Resumption) -> Severity:
        if verdict is Resumption.MIXED:
            return Severity.ERROR
        if verdict is Resumption.FROM_CHECKPOINT:
            return Severity.NOTE
        back = abs(self._lr_after - self._lr_at_start)
        on = abs(self._lr_after - self._lr_before)
        if not math.isfinite(back + on) or math.isclose(self._lr_at_start, self._lr_before):
            return Severity.WARNING
        return Severity.NOTE if back < on else Severity.ERROR

    def _evidence(self, verdict: Resumption, gathered: GatheredStep) -> Evidence:
        watch, severity = self._watch, self._severity(verdict)
        many_W = 4 * watch.again_W >= max(1, int(watch.again_W.max()))
        ranks = tuple(np.flatnonzero(many_W).tolist())
        one_in = watch.one_in
        of = f" among the one in {one_in:,} that are followed" if one_in > 1 else ""
        mixed = verdict is Resumption.MIXED
        twice = not mixed and severity is Severity.NOTE
        return Evidence(
            cause="data.resume_mismatch",
            severity=severity,
            ranks=ranks if severity is not Severity.NOTE else (),
            first_step=watch.boundary,
            last_step=gathered.step,
            count=watch.again if mixed else 1,
            fields={
                "ranks": name_ranks(ranks),
                "restart": f"{watch.boundary:,}",
                "epoch": f"{watch.interrupted:,}",
                "again": count(watch.again, "sample") + of,
                "from": f"{watch.replayed_from:,}",
                "to": f"{watch.boundary - 1:,}",
            },
            numbers={
                "restart_at": watch.boundary,
                "epoch_began_at": watch.interrupted,
                "drawn_again": watch.again,
                "follows_one_sample_in": one_in,
                **({} if mixed else {"repeats_steps_from": watch.replayed_from}),
            },
            key="" if mixed else DONE_TWICE if twice else FROM_START,
        )


def _largest(step: Observation) -> float:
    """Return the largest learning rate that is known; minus infinity without any."""
    highest = step.ends("lr")[1]
    if not math.isnan(highest):
        return max(highest, -math.inf)
    return float(np.fmax.reduce(step.gathered.workers["lr"], initial=-np.inf))  # leaves out NaN

"""The detector of a restarted job that draws samples again which its epoch had drawn before."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from rankscope.bus.detector import FaultEvidence, RestartDetector
from rankscope.bus.finding import Severity
from rankscope.bus.messages import held_values
from rankscope.bus.replicas import StateKind
from rankscope.bus.step import GatheredStep
from rankscope.bus.steps import Step, StepBatch
from rankscope.bus.words import count, name_ranks
from rankscope.stats.arrays import Bools, Ints
from rankscope.stats.draws import (
    DrawnSamples,
    Draws,
    SampleShare,
    SortedMap,
    differs_from_previous,
)
from rankscope.stats.state import Stateful

_CHUNK = 8  # draws that decide together whether a new epoch has begun
_EARLY_STEPS = 4
_EARLY_DRAWS = 64
_EARLY_SHARE = 0.02
_LEAST = 16
_BY_CHANCE = 5
_WIDEST = 8  # steps of the old job in one of the new


class Resumption(StrEnum):
    """How a restarted job went on."""

    MIXED = "mixed"
    """Samples that the epoch had drawn came again among those of its rest."""
    FROM_START = "from start"
    """All steps of the epoch came again in order, and then its rest."""
    FROM_CHECKPOINT = "from checkpoint"
    """Some of its last steps came again in order, and then its rest."""


@dataclass
class RestartedJob(Stateful):
    """What a restarted job has drawn since its first step, beside the epoch that was interrupted.

    A healthy job draws the rest of that epoch first. When it draws samples again that the epoch had
    drawn before, the rest is used up, but for fewer than one global batch that an epoch's end
    leaves out. So what proves a fault is a rest that still arrives after many samples have come
    again: more of them than sampling with replacement would repeat, too.
    """

    boundary: int  # the job's first step
    interrupted: int  # first step of the interrupted epoch
    end: int  # the last step before the restart
    in_first_epoch: bool  # whether the interrupted epoch is the first one
    rows: int  # of the data set; 0 if unknown
    unfinished: bool  # whether the interrupted epoch is known to have a rest
    drawn: int  # samples of the interrupted epoch
    repeated: int  # those of them that came again inside of it
    again_W: Ints  # draws of the interrupted epoch's samples, by worker
    undecided: bool  # whether it is still open how the job goes on
    again: int = 0  # the same of different samples
    mixed: bool = False
    replaying: bool = True  # whether all steps so far repeat old ones in order
    before_from: int = -1  # the first of the last steps before the epoch that came again
    before_to: int = -1
    replayed_from: int = -1
    replayed_to: int = -1
    steps: int = 0
    draws: int = 0
    rest: int = 0  # of the epoch's rest, once enough had come again
    since: int = 0  # that came again since the restart
    model_after: int = -1  # the step after which its parameters were saved; -1 if unknown
    may_be_new: bool = False  # whether nothing shows that it is not another training

    def look(
        self, draws: Draws, samples_U: Ints, last_U: Ints, one_in: int, tolerance: float
    ) -> Resumption | None:
        """Judge a step, by the last steps that drew its samples before.

        One sample in ``one_in`` is followed; ``tolerance`` of them may be left out by an epoch.
        """
        again_U = (last_U >= self.interrupted) & (last_U < self.boundary)
        again_D = again_U[samples_U.searchsorted(draws.samples)]
        rest = self._num_of_rest(last_U)
        proves = self._has_drawn_enough()
        self.steps += 1
        self.draws += len(last_U)
        self.since += int(np.sum(last_U >= self.boundary))
        self.again += int(again_U.sum())
        self.again_W = self.again_W + np.bincount(draws.ranks[again_D], minlength=draws.shape[1])
        if self.replaying:
            self.replaying = self._goes_on_replaying(last_U, again_U, rest, one_in)
            if self.replaying:
                return self._begins_again(one_in)
        self.rest += rest if proves else 0
        if self.rest > tolerance and not self.mixed:
            return self._decide()
        self.undecided = not self._is_over()
        return Resumption.MIXED if self.mixed and again_U.any() else None

    @property
    def done_from(self) -> int:
        """The first step that came again in order; -1 without one."""
        return self.replayed_from if self.before_from < 0 else self.before_from

    @property
    def is_ahead(self) -> bool:
        """Whether its parameters are known to have trained on a step that came again."""
        return 0 <= self.done_from <= self.model_after

    @property
    def went_back(self) -> bool:
        """Whether its parameters are known to be those before the first step that came again."""
        return 0 <= self.model_after == self.done_from - 1

    def halve(self) -> None:
        """Follow half as many samples from now on."""
        self.drawn = max(self.drawn // 2, 1)
        self.repeated //= 2
        self.again //= 2
        self.draws //= 2
        self.rest //= 2
        self.since //= 2
        self.again_W = self.again_W // 2

    def _num_of_rest(self, last_U: Ints) -> int:
        """Count samples of the epoch's rest; in the first epoch, those never seen before."""
        if self.in_first_epoch:
            return int(np.sum(last_U < 0))
        return int(np.sum((last_U >= 0) & (last_U < self.interrupted)))

    def _decide(self) -> Resumption:
        if not self._has_replayed():
            self.mixed = True
            return Resumption.MIXED
        self.undecided = False
        whole = self.done_from == self.interrupted
        return Resumption.FROM_START if whole else Resumption.FROM_CHECKPOINT

    def _begins_again(self, one_in: int) -> Resumption | None:
        """Return that the epoch has begun again, where most of its rest is certainly left."""
        early = self.steps < _EARLY_STEPS or self.draws < _EARLY_DRAWS
        if early or self.done_from != self.interrupted:
            return None
        most_left = 2 * self.drawn * one_in <= self.rows
        if not (most_left or (self.unfinished and self.is_ahead)):
            return None
        self.undecided = False
        return Resumption.FROM_START

    def _goes_on_replaying(self, last_U: Ints, again_U: Bools, rest: int, one_in: int) -> bool:
        """Return whether this step goes on repeating the old ones in order, up to the restart."""
        if self.replayed_from < 0 and self._goes_on_before(last_U, one_in):
            return True
        if not again_U.any():
            return False
        low = int(last_U[again_U].min())
        high = int(last_U[again_U].max())
        gap = low - self.replayed_to
        furthest = 1 if one_in == 1 else 2 * _WIDEST
        follows = self.replayed_from >= 0 and 0 <= gap <= furthest
        reached = high == self.end
        # those that came in both epochs, and with the steps before
        twice_U = (last_U >= self.boundary) & (self.before_from >= 0)
        alone = bool((again_U | twice_U).all())
        begins = self.replayed_from < 0 and alone and high - low <= _WIDEST
        ends = reached and int((again_U | twice_U).sum()) + rest == len(last_U)
        if not (begins or (follows and (alone or ends))):
            self.replayed_to = -1
            return False
        self.replayed_from = low if self.replayed_from < 0 else self.replayed_from
        self.replayed_to = high
        return not reached

    def _goes_on_before(self, last_U: Ints, one_in: int) -> bool:
        """Return whether this step repeats, in order, steps before the epoch: a checkpoint's.

        Some of its samples may have come in the epoch as well.
        """
        before_U = last_U[(last_U >= 0) & (last_U < self.interrupted)]
        if 2 * len(before_U) <= len(last_U):
            return False
        low = int(before_U.min())
        high = int(before_U.max())
        gap = low - self.before_to
        furthest = 1 if one_in == 1 else 2 * _WIDEST
        first = self.before_from < 0 and self.steps == 1
        if high - low > _WIDEST or not (first or (self.before_from >= 0 and 0 <= gap <= furthest)):
            self.before_from = -1
            return False
        self.before_from = low if first else self.before_from
        self.before_to = high
        return True

    def _has_drawn_enough(self) -> bool:
        """Return whether enough samples came again for a later rest to prove a fault."""
        if self._has_replayed():
            return True
        by_chance = 3 * (self.draws / self.drawn) * (self.repeated + _BY_CHANCE)
        return not self.replaying and self.again > _LEAST + by_chance

    def _has_replayed(self) -> bool:
        """Return whether all steps from some step to the restart came again in order."""
        return self.replayed_from >= 0 and self.replayed_to == self.end

    def _is_over(self) -> bool:
        """Return whether the job has proved to go on, or whole epochs have passed."""
        begun = self.steps >= _EARLY_STEPS and self.draws >= _EARLY_DRAWS
        goes_on = begun and self.again < _EARLY_SHARE * self.draws
        return (goes_on and not self._has_replayed()) or 2 * self.since > self.draws


class RestartWatch(Stateful):
    """Follows epochs, and after a restart the rest of the one that was interrupted.

    Beyond ``capacity`` different samples, only a random share of them is followed. ``rows`` are
    those of the data set, None if unknown.
    """

    SETTINGS = ("_capacity", "_num_workers", "_rows")

    def __init__(self, num_workers: int, capacity: int = 1 << 18, rows: int | None = None) -> None:
        self._rows = rows or 0
        self._capacity = capacity
        self._num_workers = num_workers
        self._share = SampleShare()
        self._last = SortedMap(np.int32)
        self._last_step = -1
        self._most_drawn = 0
        self.epoch = -1
        self._num_epochs = 0
        self._drawn = self._repeated = 0
        self._longest = 0  # samples of the longest epoch that is over
        self._chunk_start = -1
        self._chunk_drawn = 0
        self._chunk_again = 0
        self.job: RestartedJob | None = None  # the restarted one; None in a job's first start

    @property
    def one_in(self) -> int:
        """Number of samples that each followed one stands for; 1 while the counts are exact."""
        return self._share.one_in

    def restart(self, step: int, *, goes_on: bool = False) -> None:
        """Begin a restarted job with this step; ``goes_on``: the data had a rest."""
        self._end_chunk()
        overlaps = self._repeated >= _CHUNK and self._repeated > _EARLY_SHARE * self._drawn
        self.job = RestartedJob(
            boundary=step,
            interrupted=self.epoch,
            end=self._last_step,
            in_first_epoch=self._num_epochs <= 1,
            rows=self._rows,
            unfinished=goes_on or self._drawn + self._tolerance() < self._longest,
            drawn=self._drawn,
            repeated=self._repeated,
            again_W=np.zeros(self._num_workers, np.int64),
            undecided=self._drawn > 0 and not overlaps,
        )

    def observe(self, steps: Sequence[int], drawn: DrawnSamples) -> Iterator[Resumption | None]:
        """Process the samples of consecutive steps; yield how the restarted job went on."""

        def fits(samples: Ints) -> bool:
            some = int(np.count_nonzero(self._share.admits(samples)))
            return len(self._last) + some <= self._capacity

        begin = 0
        for few in drawn.fitting_pieces(fits):
            yield from self._process(steps[begin : begin + len(few)], few)
            begin += len(few)

    def _process(self, steps: Sequence[int], drawn: DrawnSamples) -> Iterator[Resumption | None]:
        """Process steps that share no sample: a single one, or several if there is room."""
        draws = drawn.sorted(self._share.admits(drawn.flat))
        different = draws.where(differs_from_previous(draws.samples))
        numbers_U = np.array(steps, np.int32)[different.steps]
        known_U, latest_U = self._last.put(different.samples, numbers_U)
        last_U = np.where(known_U, latest_U, np.int64(-1))
        lasts = different.of_steps(last_U)
        samples = different.of_steps(different.samples)
        for index, step in enumerate(steps):
            self._most_drawn = max(self._most_drawn, int(drawn.lengths[index]))
            verdict = None
            if self.job is not None and self.job.undecided and len(samples[index]):
                own = draws if len(drawn) == 1 else draws.where(draws.steps == index)
                verdict = self._look(self.job, own, samples[index], lasts[index])
            self._follow_epoch(step, lasts[index])
            self._last_step = step if len(samples[index]) else self._last_step
            while len(self._last) > self._capacity and self._share.can_halve:
                self._halve()
            yield verdict

    def _look(
        self, job: RestartedJob, draws: Draws, samples_U: Ints, last_U: Ints
    ) -> Resumption | None:
        """Judge a step after a restart; a job that has only repeated steps is in the old epoch."""
        verdict = job.look(draws, samples_U, last_U, self.one_in, self._tolerance())
        if verdict in (Resumption.FROM_START, Resumption.FROM_CHECKPOINT):
            self.epoch = job.interrupted
            self._drawn = job.drawn
            self._repeated = job.repeated
            self._num_epochs = 1 if job.in_first_epoch else self._num_epochs
        return verdict

    def _tolerance(self) -> float:
        """Samples that an epoch's end may leave out, and the step that crosses its border."""
        expected = 2 * self._most_drawn / self.one_in
        return expected + (4 * math.sqrt(expected) if self.one_in > 1 else 0)

    def _follow_epoch(self, step: int, last_U: Ints) -> None:
        if self.epoch < 0:
            self.epoch = step
            self._num_epochs = 1
        if self._chunk_drawn == 0:
            self._chunk_start = step
        self._chunk_drawn += len(last_U)
        self._chunk_again += int(np.count_nonzero(last_U >= self.epoch))
        if self._chunk_drawn >= _CHUNK:
            self._end_chunk()

    def _end_chunk(self) -> None:
        if 2 * self._chunk_again > self._chunk_drawn:  # most of it came before: the next epoch
            self.epoch = self._chunk_start
            self._longest = max(self._longest, self._drawn)
            self._num_epochs += 1
            self._drawn = self._chunk_drawn
            self._repeated = 0
        else:
            self._drawn += self._chunk_drawn
            self._repeated += self._chunk_again
        self._chunk_drawn = self._chunk_again = 0

    def _halve(self) -> None:
        self._share.halve()
        self._last.keep(self._share.admits)
        self._drawn //= 2
        self._repeated //= 2
        self._longest //= 2
        if self.job is not None:
            self.job.halve()


_MOST_SAVED = 16
_OPTIMIZER = "optimizer"  # of what sessions begin and end with
_BITS = "parameters: bits"
_COUNTER = "step: highest"
_HELD = ": held"

FROM_START = "epoch-begun-again"
DONE_TWICE = "steps-done-twice"
LOADER_BEHIND = "loader-behind-model"
"""Keys of the findings whose words differ from those of ``data.resume_mismatch``."""

_KNOWN = "the model went on from step {:,}, bit for bit, and the data loader did not"
_UNKNOWN = (
    "either the data loader was not restored, or the whole job went back to a checkpoint from the "
    "epoch's start"
)
_UNLESS = "Nothing is wrong if the job was restarted from a checkpoint of step {:,}. "


class ResumeMismatch(RestartDetector):
    """After a restart, samples that the interrupted epoch had drawn come again before its rest.

    - In another order, it is an error: the loader shuffled again. It is a warning where no saved
      state has the parameters, and the optimizer is as new: the job may be another training.
    - All steps of the epoch in the same order: the loader was not advanced, or the whole job went
      back to a checkpoint from the epoch's start. Parameters that were saved decide which, bit for
      bit, or a changing learning rate. The first steps suffice where the data set has more than
      twice what the epoch had drawn; and with parameters that have trained on them, where loaders
      were not read to their end, or an earlier epoch was longer. That is a warning.
    - The last few steps in the same order: the checkpoint was a little older than the last step.
      That is a note; a warning where the parameters have trained on some of them.
    """

    def __init__(self, num_workers: int, capacity: int = 1 << 18, rows: int | None = None) -> None:
        super().__init__()
        self._watch = RestartWatch(num_workers, capacity, rows)
        self._lr_by_step: dict[int, float] = {}
        self._lr_before = self._lr_after = self._lr_at_start = math.nan
        self._lr_last = math.nan
        self._saved: dict[int, Ints] = {}  # digests of parameters, by the last steps with some
        self._first_held: dict[str, Ints] = {}  # by the optimizer, as the run began
        self._goes_on = False  # whether all workers' loaders went on after the last step

    def observe(self, steps: StepBatch) -> Iterator[Iterable[FaultEvidence]]:
        """Process consecutive steps; yield how a restarted job went on, once that shows."""
        if self._restarts():
            self._watch.restart(steps.numbers[0], goes_on=self._goes_on)
            self._lr_at_start = self._lr_by_step.get(self._watch.epoch, math.nan)
            self._lr_before = self._lr_last
        verdicts = self._watch.observe(steps.numbers, steps.columns.samples)
        for step in steps:
            lr = _largest(step)
            job = self._watch.job
            if job is not None and step.gathered.step == job.boundary:
                self._lr_after = lr
            verdict = next(verdicts)
            self._remember(step.gathered.step, lr)
            self._goes_on = step.all_true("loader_goes_on")
            self._compare_parameters(step.gathered)
            if job is None or verdict is None:
                yield ()
            else:
                yield (self._evidence(job, verdict, step.gathered),)

    def _compare_parameters(self, gathered: GatheredStep) -> None:
        if not gathered.differences:
            return
        started, saved = (
            held_values(gathered.differences, kind, _OPTIMIZER)
            for kind in (StateKind.STARTED, StateKind.SAVED)
        )
        bits = started.get(_BITS)
        if bits is not None:
            names = (name for name in started if name == _COUNTER or name.endswith(_HELD))
            self._begin(bits, {name: started[name] for name in names})
        if _BITS in saved:
            known = [*self._saved.items(), (gathered.step, saved[_BITS])]
            self._saved = dict(known[-_MOST_SAVED:])

    def _begin(self, bits: Ints, held: dict[str, Ints]) -> None:
        """Compare parameters with saved ones, and the optimizer's state with that of a new job."""
        job = self._watch.job
        if job is None:
            self._first_held = held
            return
        alike = [step for step, saved in self._saved.items() if np.array_equal(bits, saved)]
        job.model_after = max(alike, default=-1)
        as_new = held.keys() == self._first_held.keys() and all(
            np.array_equal(values, self._first_held[name]) for name, values in held.items()
        )
        job.may_be_new = as_new and not alike

    def _remember(self, step: int, lr: float) -> None:
        """Keep the learning rate of the epoch's first step, which arrives a little later."""
        self._lr_last = lr
        self._lr_by_step[step] = lr
        epoch = self._watch.epoch
        for old in [s for s in self._lr_by_step if s != epoch and not step - 8 <= s <= step]:
            del self._lr_by_step[old]

    def _severity(self, verdict: Resumption, job: RestartedJob) -> Severity:
        most = self._shown_severity(verdict, job)
        return min(most, Severity.WARNING) if job.may_be_new else most

    def _shown_severity(self, verdict: Resumption, job: RestartedJob) -> Severity:
        if verdict is Resumption.MIXED:
            return Severity.ERROR
        if job.went_back:
            return Severity.NOTE
        if verdict is Resumption.FROM_CHECKPOINT:
            return Severity.WARNING if job.is_ahead else Severity.NOTE
        most = Severity.WARNING if job.replaying else Severity.ERROR
        back = abs(self._lr_after - self._lr_at_start)
        on = abs(self._lr_after - self._lr_before)
        if not math.isfinite(back + on) or math.isclose(self._lr_at_start, self._lr_before):
            return Severity.WARNING
        if back < on:
            return Severity.WARNING if job.is_ahead else Severity.NOTE
        return most

    def _evidence(
        self, job: RestartedJob, verdict: Resumption, gathered: GatheredStep
    ) -> FaultEvidence:
        severity = self._severity(verdict, job)
        many_W = 4 * job.again_W >= max(1, int(job.again_W.max()))
        ranks = tuple(np.flatnonzero(many_W).tolist())
        one_in = self._watch.one_in
        of = f" among the one in {one_in:,} that are followed" if one_in > 1 else ""
        mixed = verdict is Resumption.MIXED
        twice = not mixed and severity is Severity.NOTE
        key = "" if mixed else DONE_TWICE if twice else FROM_START
        if verdict is Resumption.FROM_CHECKPOINT and not twice:
            key = LOADER_BEHIND
        return FaultEvidence(
            cause="data.resume_mismatch",
            severity=severity,
            ranks=ranks if severity is not Severity.NOTE else (),
            first_step=job.boundary,
            last_step=gathered.step,
            count=job.again if mixed else 1,
            fields={
                "ranks": name_ranks(ranks),
                "restart": f"{job.boundary:,}",
                "epoch": f"{job.interrupted:,}",
                "again": count(job.again, "sample") + of,
                "from": f"{job.done_from:,}",
                "to": f"{job.boundary - 1:,}",
                "model": f"{job.model_after:,}",
                "why": _KNOWN.format(job.model_after) if job.is_ahead else _UNKNOWN,
                "check": "" if job.is_ahead else _UNLESS.format(job.done_from),
            },
            numbers={
                "restart_at": job.boundary,
                "epoch_began_at": job.interrupted,
                "drawn_again": job.again,
                "follows_one_sample_in": one_in,
                **({} if mixed else {"repeats_steps_from": job.done_from}),
            },
            key=key,
        )


def _largest(step: Step) -> float:
    """Return the largest known learning rate; minus infinity without any."""
    highest = step.ends("lr")[1]
    if not math.isnan(highest):
        return max(highest, -math.inf)
    return float(np.fmax.reduce(step.gathered.workers["lr"], initial=-np.inf))  # leaves out NaN

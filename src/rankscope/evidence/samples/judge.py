"""The detectors of samples; unequal micro-batches and data that nobody draws are here."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from rankscope.bus.detector import (
    Check,
    CheckedRun,
    Detector,
    FaultEvidence,
    PersistentFault,
    RestartDetector,
    RunFacts,
    evidence_at,
)
from rankscope.bus.finding import Severity
from rankscope.bus.messages import Columns, Combiner, Derived, Layout, Messages, held_values
from rankscope.bus.replicas import StateKind, minority_ranks, name_values
from rankscope.bus.step import MISSING_INT, GatheredStep
from rankscope.bus.steps import Step, StepBatch
from rankscope.bus.words import count, listed, name_ranks
from rankscope.evidence.samples.overlap import OverlappingShards
from rankscope.evidence.samples.repeats import (
    DuplicateBatches,
    FilledBatches,
    LoaderProcesses,
    RepeatedBatches,
    RepeatedOrder,
    SameResults,
)
from rankscope.stats.arrays import Bools, Ints, Ragged
from rankscope.stats.draws import (
    DrawnSamples,
    Draws,
    SampleShare,
    SortedMap,
    differs_from_previous,
    in_order,
)
from rankscope.stats.samples import ThinningLedger
from rankscope.stats.state import Stateful

_SURE = 16


class UnequalMicroBatches(Detector):
    """Numbers of micro-batches that differ between workers, the same in most steps.

    Numbers that differ now and then are healthy: an epoch ends with fewer on some workers, or
    batches are cut by tokens, and the numbers change from step to step. So steps vote (Boyer and
    Moore, 1991): each one counts for the usual numbers, or against them. Sixteen more steps for
    than against are needed.
    """

    SETTINGS = ("_num_workers",)

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._usual: tuple[int, ...] = ()
        self._votes = 0
        self._since = -1
        self._first: dict[tuple[int, ...], int] = {}  # steps, of those seen since all was usual
        self._span = PersistentFault()
        self._reported: tuple[int, ...] = ()

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report numbers that differ in most steps, and the end of that."""
        if self._num_workers < 2 or not step.all_known("micro_batches"):
            return ()
        number = step.gathered.step
        counts = tuple(step.gathered.workers["micro_batches"].tolist())
        self._vote(counts, number)
        if self._votes < _SURE or counts != self._usual:
            return ()
        if len(set(counts)) > 1:
            if self._reported != counts:
                self._span = PersistentFault()
                self._reported = counts
            self._span.see(number, first=self._since, before=number - self._since)
            return (self._evidence(),)
        return (self._evidence(),) if self._span.close() else ()

    def _vote(self, counts: tuple[int, ...], step: int) -> None:
        if counts == self._usual:
            self._votes = min(self._votes + 1, _SURE)
            if self._votes == _SURE:
                self._first = {}
            return
        if len(self._first) < _SURE:
            self._first.setdefault(counts, step)
        if self._votes:
            self._votes -= 1
        else:
            self._usual = counts
            self._votes = 1
            self._since = self._first.get(counts, step)

    def _evidence(self) -> FaultEvidence:
        return self._span.evidence(
            "data.micro_batches",
            Severity.WARNING,
            minority_ranks(self._reported),
            {"what": name_values(self._reported)},
            {"steps": self._span.count, "micro_batches": list(self._reported[:64])},
        )


SPLIT_TWICE = "data-split-twice"

_NAMED_SHARE = 0.9
_CONTENT_SHARE = 0.5  # where samples are not named: the data may hold a content several times


class EpochCoverage(Detector):
    """Samples of the data set that are never drawn, though the drawn ones come again.

    The workers have drawn D different samples, and then as many draws have brought no new one: so
    the rest is out of their reach. An epoch that ends early in a new order, or drawing with
    replacement, would have brought some. Fewer samples than two global batches may be left out:
    samplers drop what does not fill a batch.
    """

    SETTINGS = ("_length",)

    def __init__(self, length: int | None, *, replaces: bool = False) -> None:
        self._length = 0 if length is None or replaces else length
        self._ledger = ThinningLedger(1 << 16)
        self._named = True
        self._global_batch = 0
        self._since = 0
        self._span = PersistentFault()

    def observe(self, steps: StepBatch) -> Iterator[Iterable[FaultEvidence]]:
        """Process consecutive steps; yield what is never drawn, as soon as that shows."""
        if not self._length:
            yield from ([] for _ in steps)
            return
        drawn = steps.columns.samples
        for step, now in zip(steps, self._ledger.observe(drawn), strict=True):
            length = int(drawn.lengths[step.index])
            self._global_batch = max(self._global_batch, length)
            self._since = 0 if now.counts.new else self._since + length
            distinct, _ = self._ledger.scale_up(now.remembered)
            yield self._look(step, round(distinct)) if length else []

    def _look(self, step: Step, distinct: int) -> list[FaultEvidence]:
        self._named = self._named and step.all_true("samples_named")
        share = _NAMED_SHARE if self._named else _CONTENT_SHARE
        left_out = self._length - distinct
        missing = distinct < share * self._length and left_out > 2 * self._global_batch
        if missing and self._since >= distinct:
            self._span.see(step.gathered.step)
        elif not self._span.close():
            return []
        fields = {"distinct": f"{distinct:,}", "length": f"{self._length:,}"}
        numbers = {"samples_distinct": distinct, "data_set": self._length}
        return [self._span.evidence("data.coverage", Severity.WARNING, (), fields, numbers)]


class SplitTwice(Detector):
    """Data that the loaders split into more parts than there are processes."""

    SETTINGS = ("_splits", "_world_size")

    def __init__(self, splits: Sequence[tuple[str, int]], world_size: int) -> None:
        self._splits = tuple(splits)
        self._world_size = world_size
        self._seen = False

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Report once, in the first step."""
        parts = int(np.prod([number for _, number in self._splits], dtype=np.int64))
        if self._seen or not self._world_size or parts <= self._world_size:
            return ()
        self._seen = True
        fields = {
            "what": listed([f"{name} into {count(n, 'part')}" for name, n in self._splits]),
            "parts": f"{parts:,}",
            "processes": count(self._world_size, "process", "processes"),
        }
        numbers = {"splits": [list(one) for one in self._splits], "parts": parts}
        at = step.gathered.step
        cause = "data.coverage"
        return (evidence_at(at, cause, Severity.WARNING, (), fields, numbers, key=SPLIT_TWICE),)


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    num_workers = run.num_workers
    repeats = run.plan.repeats
    drawn_again = repeats or run.with_replacement
    return (
        DuplicateBatches(num_workers, repeats=repeats, by_loop=run.by_loop),
        SameResults(num_workers, repeats=repeats),
        OverlappingShards(num_workers, repeats=drawn_again, seeds=run.sampler_seeds),
        RepeatedOrder(repeats=repeats),
        RepeatedBatches(num_workers, repeats=repeats),
        LoaderProcesses(),
        FilledBatches(repeats=repeats),
        ResumeMismatch(num_workers),
        EpochCoverage(run.data_length, replaces=drawn_again),
        SplitTwice(run.data_splits, run.world_size),
        UnequalMicroBatches(num_workers),
    )


def make_checks(run: CheckedRun) -> tuple[Check, ...]:
    """Return the checks of a run."""
    impossible = "" if run.samples else "samples were not identified"
    return (Check("shared batches", 3, impossible),)


class Samples(Combiner):
    """Samples of all workers."""

    def combine(self, messages: Messages, columns: Columns) -> Mapping[str, Any]:
        """Fill in each worker's number of samples and their digest; return the samples."""
        samples = messages["samples_B"]
        _fill_samples(columns, samples)
        return {"samples": samples.rows}


def make_combiner(layout: Layout) -> Samples:
    """Return the combiner of samples."""
    return Samples()


def _fill_samples(columns: Columns, samples: Ragged) -> None:
    """Fill in each worker's number of samples, and their digest, whatever their order."""
    columns["num_samples"][:] = samples.lengths_R
    some_W = samples.lengths_R > 0
    sums_W = Ragged(_mix(samples.flat), samples.lengths_R).reduced(np.add, 0)
    columns["batch_digest"][some_W] = sums_W[some_W]


def _mix(samples: Ints) -> Ints:
    """Spread ids over 64 bits (the finaliser of SplitMix64), so that sums of sets differ."""
    bits = samples.astype(np.uint64)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits ^ (bits >> np.uint64(31))).view(np.int64)


def derive(gathered: GatheredStep) -> Derived:
    """Return how many samples were drawn, and how many of them differ; NaN where unknown."""
    named_W = np.array([*map(len, gathered.samples)], np.int64)
    sent_W = gathered.workers["num_samples"]
    drawn = int(np.maximum(named_W, np.where(sent_W == MISSING_INT, 0, sent_W)).sum())
    if drawn == 0:
        return Derived({"samples_drawn": np.nan, "samples_distinct": np.nan})
    whole = named_W.sum() == drawn
    distinct = float(len(in_order(np.concatenate(gathered.samples)))) if whole else np.nan
    return Derived({"samples_drawn": float(drawn), "samples_distinct": distinct})


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


class RestartWatch(Stateful):
    """Follows epochs, and after a restart the rest of the one that was interrupted.

    A healthy job draws that rest first. When it draws samples again that the epoch had drawn
    before, the rest is used up, but for fewer than one global batch that an epoch's end leaves
    out. So what proves a fault is a rest that still arrives after many samples have come again:
    more of them than sampling with replacement would repeat, too.

    Beyond ``capacity`` different samples, only a random share of them is followed.
    """

    SETTINGS = ("_capacity",)

    def __init__(self, num_workers: int, capacity: int = 1 << 18) -> None:
        self._capacity = capacity
        self._share = SampleShare()
        self._last = SortedMap(np.int32)
        self._most_drawn = 0
        self.epoch = -1
        self._num_epochs = 0
        self._drawn = self._repeated = 0
        self._chunk_start = -1
        self._chunk_drawn = 0
        self._chunk_again = 0
        self.boundary = -1
        self.interrupted = -1
        self._watching = False
        self._before = (0, 0)
        self.again = 0
        self.again_W = np.zeros(num_workers, np.int64)
        self._draws = self._steps = self._rest = self._since = 0
        self._replaying = False
        self.replayed_from = -1
        self._replayed_to = -1
        self._mixed = False
        self._in_first_epoch = True
        self._end = self._last_step = -1

    @property
    def one_in(self) -> int:
        """Number of samples that each followed one stands for; 1 while the counts are exact."""
        return self._share.one_in

    def restart(self, step: int) -> None:
        """Begin a restarted job with this step."""
        self._end_chunk()
        drawn = self._drawn
        repeated = self._repeated
        overlaps = repeated >= _CHUNK and repeated > _EARLY_SHARE * drawn
        self._watching = drawn > 0 and not overlaps
        self.boundary = step
        self.interrupted = self.epoch
        self._before = drawn, repeated
        self.again = 0
        self.again_W = np.zeros_like(self.again_W)
        self._draws = self._steps = self._rest = self._since = 0
        self._replaying = True
        self.replayed_from = -1
        self._replayed_to = -1
        self._mixed = False
        self._in_first_epoch = self._num_epochs <= 1
        self._end = self._last_step

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
            if self._watching and len(samples[index]):
                own = draws if len(drawn) == 1 else draws.where(draws.steps == index)
                verdict = self._look(own, samples[index], lasts[index])
            self._follow_epoch(step, lasts[index])
            self._last_step = step if len(samples[index]) else self._last_step
            while len(self._last) > self._capacity and self._share.can_halve:
                self._halve()
            yield verdict

    def _look(self, draws: Draws, samples_U: Ints, last_U: Ints) -> Resumption | None:
        """Judge a step after a restart, by the last steps that drew its samples before."""
        again_U = (last_U >= self.interrupted) & (last_U < self.boundary)
        again_D = again_U[samples_U.searchsorted(draws.samples)]
        again_W = np.bincount(draws.ranks[again_D], minlength=draws.shape[1])
        rest = self._num_of_rest(last_U)
        decided_before = self._is_decided()
        self._steps += 1
        self._draws += len(last_U)
        self._since += int(np.sum(last_U >= self.boundary))
        self.again += int(again_U.sum())
        self.again_W += again_W
        if self._replaying:
            self._replaying = self._goes_on_replaying(last_U, again_U, rest)
            if self._replaying:
                return None
        self._rest += rest if decided_before else 0
        if self._rest > self._tolerance() and not self._mixed:
            return self._decide()
        self._watching = not self._is_over()
        return Resumption.MIXED if self._mixed and again_U.any() else None

    def _num_of_rest(self, last_U: Ints) -> int:
        """Count samples of the epoch's rest; in the first epoch, those never seen before."""
        if self._in_first_epoch:
            return int(np.sum(last_U < 0))
        return int(np.sum((last_U >= 0) & (last_U < self.interrupted)))

    def _decide(self) -> Resumption:
        if not self._has_replayed():
            self._mixed = True
            return Resumption.MIXED
        self._watching = False
        self.epoch = self.interrupted
        self._drawn, self._repeated = self._before
        self._num_epochs = 1 if self._in_first_epoch else self._num_epochs
        whole = self.replayed_from == self.interrupted
        return Resumption.FROM_START if whole else Resumption.FROM_CHECKPOINT

    def _goes_on_replaying(self, last_U: Ints, again_U: Bools, rest: int) -> bool:
        """Return whether this step goes on repeating the old ones in order, up to the restart."""
        if not again_U.any():
            return False
        low = int(last_U[again_U].min())
        high = int(last_U[again_U].max())
        gap = low - self._replayed_to
        furthest = 1 if self.one_in == 1 else 2 * _WIDEST
        follows = self.replayed_from >= 0 and 0 <= gap <= furthest
        reached = high == self._end
        alone = bool(again_U.all())
        begins = self.replayed_from < 0 and alone and high - low <= _WIDEST
        ends = reached and int(again_U.sum()) + rest == len(last_U)
        if not (begins or (follows and (alone or ends))):
            self._replayed_to = -1
            return False
        self.replayed_from = low if self.replayed_from < 0 else self.replayed_from
        self._replayed_to = high
        return not reached

    def _is_decided(self) -> bool:
        """Return whether enough samples came again for a later rest to prove a fault."""
        if self._has_replayed():
            return True
        drawn, repeated = self._before
        by_chance = 3 * (self._draws / drawn) * (repeated + _BY_CHANCE)
        return not self._replaying and self.again > _LEAST + by_chance

    def _has_replayed(self) -> bool:
        """Return whether all steps from some step to the restart came again in order."""
        return self.replayed_from >= 0 and self._replayed_to == self._end

    def _is_over(self) -> bool:
        """Return whether the job has proved to go on, or whole epochs have passed."""
        begun = self._steps >= _EARLY_STEPS and self._draws >= _EARLY_DRAWS
        goes_on = begun and self.again < _EARLY_SHARE * self._draws
        return (goes_on and not self._has_replayed()) or 2 * self._since > self._draws

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
        self._before = max(self._before[0] // 2, 1), self._before[1] // 2
        for name in ("again", "_draws", "_rest", "_since"):
            setattr(self, name, getattr(self, name) // 2)
        self.again_W //= 2


_OPTIMIZER, _BITS = "optimizer", "parameters: bits"  # of what sessions begin and end with

FROM_START = "epoch-begun-again"
DONE_TWICE = "steps-done-twice"
LOADER_BEHIND = "loader-behind-model"
"""Keys of the findings whose words differ from those of ``data.resume_mismatch``."""


class ResumeMismatch(RestartDetector):
    """After a restart, samples that the interrupted epoch had drawn come again before its rest.

    - In another order, it is an error: the loader shuffled again.
    - All steps of the epoch in the same order: the loader was not advanced, or the whole job went
      back to a checkpoint from the epoch's start. A changing learning rate decides which.
    - The last few steps in the same order: the checkpoint was a little older than the last step.
      That is a note; a warning where the parameters are those after the last step, bit for bit.
    """

    def __init__(self, num_workers: int, capacity: int = 1 << 18) -> None:
        super().__init__()
        self._watch = RestartWatch(num_workers, capacity)
        self._lr_by_step: dict[int, float] = {}
        self._lr_before = self._lr_after = self._lr_at_start = math.nan
        self._lr_last = math.nan
        self._saved: tuple[int, Ints] | None = None  # the last step with parameters that are known
        self._last_step = -1
        self._at_end = False  # whether a restarted job began with the last step's parameters

    def observe(self, steps: StepBatch) -> Iterator[Iterable[FaultEvidence]]:
        """Process consecutive steps; yield how a restarted job went on, once that shows."""
        if self._restarts():
            self.restarted(steps.numbers[0])
        verdicts = self._watch.observe(steps.numbers, steps.columns.samples)
        for step in steps:
            lr = _largest(step)
            if step.gathered.step == self._watch.boundary:
                self._lr_after = lr
            verdict = next(verdicts)
            self._remember(step.gathered.step, lr)
            self._compare_parameters(step.gathered)
            yield () if verdict is None else (self._evidence(verdict, step.gathered),)

    def restarted(self, step: int) -> None:
        """Begin a restarted job with this step."""
        self._watch.restart(step)
        self._lr_at_start = self._lr_by_step.get(self._watch.interrupted, math.nan)
        self._lr_before = self._lr_last

    def _compare_parameters(self, gathered: GatheredStep) -> None:
        rows = gathered.differences
        started, saved = (
            held_values(rows, kind, _OPTIMIZER).get(_BITS) if rows else None
            for kind in (StateKind.STARTED, StateKind.SAVED)
        )
        if started is not None:
            known = self._saved if self._saved and self._saved[0] == self._last_step else None
            self._at_end = known is not None and np.array_equal(known[1], started)
        if saved is not None:
            self._saved = gathered.step, saved
        self._last_step = gathered.step

    def _remember(self, step: int, lr: float) -> None:
        """Keep the learning rate of the epoch's first step, which arrives a little later."""
        self._lr_last = lr
        self._lr_by_step[step] = lr
        epoch = self._watch.epoch
        for old in [s for s in self._lr_by_step if s != epoch and not step - 8 <= s <= step]:
            del self._lr_by_step[old]

    def _severity(self, verdict: Resumption) -> Severity:
        if verdict is Resumption.MIXED:
            return Severity.ERROR
        if verdict is Resumption.FROM_CHECKPOINT:
            return Severity.WARNING if self._at_end else Severity.NOTE
        back = abs(self._lr_after - self._lr_at_start)
        on = abs(self._lr_after - self._lr_before)
        if not math.isfinite(back + on) or math.isclose(self._lr_at_start, self._lr_before):
            return Severity.WARNING
        return Severity.NOTE if back < on else Severity.ERROR

    def _evidence(self, verdict: Resumption, gathered: GatheredStep) -> FaultEvidence:
        watch = self._watch
        severity = self._severity(verdict)
        many_W = 4 * watch.again_W >= max(1, int(watch.again_W.max()))
        ranks = tuple(np.flatnonzero(many_W).tolist())
        one_in = watch.one_in
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
            key=key,
        )


def _largest(step: Step) -> float:
    """Return the largest known learning rate; minus infinity without any."""
    highest = step.ends("lr")[1]
    if not math.isnan(highest):
        return max(highest, -math.inf)
    return float(np.fmax.reduce(step.gathered.workers["lr"], initial=-np.inf))  # leaves out NaN

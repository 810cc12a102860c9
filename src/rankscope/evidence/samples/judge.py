"""The detectors of samples; unequal micro-batches and data that nobody draws are here."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rankscope.bus.detector import (
    Check,
    CheckedRun,
    Detector,
    FaultEvidence,
    PersistentFault,
    RunFacts,
    evidence_at,
)
from rankscope.bus.finding import Severity
from rankscope.bus.messages import Columns, Combiner, Derived, Layout, Messages
from rankscope.bus.replicas import minority_ranks, name_values
from rankscope.bus.step import GatheredStep
from rankscope.bus.steps import Step, StepBatch
from rankscope.bus.words import count, listed, name_ranks
from rankscope.evidence.samples.duplicates import DuplicateBatches, SameResults
from rankscope.evidence.samples.epochs import EpochsCutShort
from rankscope.evidence.samples.orders import RepeatedOrder
from rankscope.evidence.samples.overlap import OverlappingShards
from rankscope.evidence.samples.repeats import (
    FilledBatches,
    LoaderProcesses,
    RepeatedBatches,
    StaleSamples,
)
from rankscope.evidence.samples.resume import ResumeMismatch
from rankscope.stats.arrays import MISSING_INT, Ints, Ragged
from rankscope.stats.draws import in_order
from rankscope.stats.samples import ThinningLedger

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


PADDING = "data.padding_side"
_STEPS_OF_PADDING = 24


class PaddingSides(Detector):
    """Workers whose samples are all padded on the other side than all of the others'.

    In 24 steps in a row, of those in which each worker pads a sample.
    """

    SETTINGS = ("_num_workers",)

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._span = PersistentFault(_STEPS_OF_PADDING, in_a_row=True)
        self._left: list[int] = []

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report workers that pad on the other side, and their end."""
        left_W = step.gathered.workers["padded_left"]
        if not np.isfinite(left_W).all():
            return ()
        apart = np.isin(left_W, (0.0, 1.0)).all() and np.ptp(left_W) > 0
        if apart:
            self._left = np.flatnonzero(left_W).tolist()
        odd = minority_ranks(left_W.tolist()) if apart else ()
        if not self._span.observe(step.gathered.step, odd):
            return ()
        span = self._span
        over = "" if span.open else " They are alike again."
        fields = {"left": name_ranks(self._left), "over": over}
        severity = span.severity(self._num_workers)
        return [span.evidence(PADDING, severity, span.ranks, fields, {"steps": span.count})]


SPLIT_TWICE = "data-split-twice"
SHARDED_FIRST = "data-sharded-first"

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
    """Data that the loaders split into more parts than there are processes.

    Or into one for each, where the data sets of ranks have ``other_rows``, or another order.
    """

    SETTINGS = ("_splits", "_world_size", "_other_rows")

    def __init__(
        self, splits: Sequence[tuple[str, int]], world_size: int, other_rows: Sequence[int] = ()
    ) -> None:
        self._splits = tuple(splits)
        self._world_size = world_size
        self._other_rows = tuple(other_rows)
        self._seen = False

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Report once, in the first step."""
        parts = int(np.prod([number for _, number in self._splits], dtype=np.int64))
        of_others = parts == self._world_size and bool(self._other_rows)
        whose = name_ranks(self._other_rows)
        many = len(self._other_rows) > 1
        some = len(self._other_rows) < step.gathered.num_workers
        if self._seen or not self._world_size or not (parts > self._world_size or of_others):
            return ()
        self._seen = True
        fields = {
            "what": listed([f"{name} into {count(n, 'part')}" for name, n in self._splits]),
            "parts": f"{parts:,}",
            "have": f"The data set{'s' if many else ''} of {whose} ha{'ve' if many else 's'}",
            "than": " than the others'" if some else "",
            "processes": count(self._world_size, "process", "processes"),
        }
        numbers = {"splits": [list(one) for one in self._splits], "parts": parts}
        at = step.gathered.step
        cause = "data.coverage"
        key = SHARDED_FIRST if of_others else SPLIT_TWICE
        ranks = self._other_rows if of_others else ()
        return (evidence_at(at, cause, Severity.WARNING, ranks, fields, numbers, key=key),)


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    num_workers = run.num_workers
    repeats = run.plan.repeats
    drawn_again = repeats or run.with_replacement
    return (
        DuplicateBatches(num_workers, repeats=repeats, by_loop=run.by_loop),
        SameResults(num_workers, repeats=repeats),
        OverlappingShards(
            num_workers, repeats=drawn_again, seeds=run.sampler_seeds, rows=run.data_rows
        ),
        RepeatedOrder(repeats=repeats, order=run.data_order),
        RepeatedBatches(num_workers, repeats=repeats),
        StaleSamples(num_workers, intended=drawn_again),
        LoaderProcesses(),
        FilledBatches(repeats=repeats),
        ResumeMismatch(num_workers, rows=run.data_rows),
        EpochsCutShort(repeats=drawn_again),
        EpochCoverage(run.data_length, replaces=drawn_again),
        SplitTwice(run.data_splits, run.world_size, run.other_rows),
        UnequalMicroBatches(num_workers),
        PaddingSides(num_workers),
    )


def make_checks(run: CheckedRun) -> tuple[Check, ...]:
    """Return the checks of a run."""
    impossible = "" if run.samples else "samples were not identified"
    return (Check("shared batches", 3, impossible),)


class Samples(Combiner):
    """Samples of all workers.

    Where the row of each sample is known on each worker, and their data sets store the same rows,
    rows stand for samples: augmentation makes other content of one row on each worker. From the
    first later step on that lacks them, digests of content do.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._by_rows: bool | None = None  # None before the first step that has rows

    def combine(self, messages: Messages, columns: Columns) -> Mapping[str, Any]:
        """Fill in each worker's number of samples, and their digest, whatever their order."""
        samples = messages["samples_B"]
        rows = messages["rows_B"]
        if self._by_rows is not False and samples.lengths_R.any():
            same = np.array_equal(rows.lengths_R, samples.lengths_R)
            data_W = columns["rows_digest"]
            if same and data_W[0] != MISSING_INT and (data_W == data_W[0]).all():
                self._by_rows = True
                samples = rows
                columns["samples_named"][:] = 1
            elif self._by_rows:
                self._by_rows = False
        columns["num_samples"][:] = samples.lengths_R
        some_W = samples.lengths_R > 0
        sums_W = Ragged(_mix(samples.flat), samples.lengths_R).reduced(np.add, 0)
        columns["batch_digest"][some_W] = sums_W[some_W]
        return {"samples": samples.rows}


make_combiner = Samples


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

"""The detectors of samples: duplicates, overlaps, order, resumption."""

from rankscope.bus.detector import Check, CheckedRun, Detector, RunFacts
from rankscope.evidence.samples.coverage import EpochCoverage, SplitTwice
from rankscope.evidence.samples.duplicates import DuplicateBatches, SameResults
from rankscope.evidence.samples.epochs import RepeatedOrder
from rankscope.evidence.samples.micro_batches import UnequalMicroBatches
from rankscope.evidence.samples.overlap import OverlappingShards
from rankscope.evidence.samples.repeats import FilledBatches, RepeatedBatches
from rankscope.evidence.samples.resume import ResumeMismatch


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

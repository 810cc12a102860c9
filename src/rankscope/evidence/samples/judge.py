"""What judges samples: duplicates, overlaps, order, resumption."""

from rankscope.bus.checks import Check, CheckedRun
from rankscope.bus.run import RunFacts
from rankscope.diagnose.duplicates import DuplicateBatches
from rankscope.diagnose.epochs import RepeatedOrder
from rankscope.diagnose.evidence import Detector
from rankscope.diagnose.micro_batches import MicroBatches
from rankscope.diagnose.overlap import OverlappingShards
from rankscope.diagnose.repeats import FilledBatches, RepeatedBatches
from rankscope.diagnose.resume import ResumeMismatch


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return what looks for faults in a run."""
    num_workers = run.num_workers
    repeats = run.plan.repeats
    drawn_again = repeats or run.with_replacement
    return (
        DuplicateBatches(num_workers, repeats=repeats),
        OverlappingShards(num_workers, repeats=drawn_again, seeds=run.sampler_seeds),
        RepeatedOrder(repeats=repeats),
        RepeatedBatches(num_workers, repeats=repeats),
        FilledBatches(repeats=repeats),
        ResumeMismatch(num_workers),
        MicroBatches(num_workers),
    )


def make_checks(run: CheckedRun) -> tuple[Check, ...]:
    """Return what a run is checked for."""
    impossible = "" if run.samples else "samples were not identified"
    return (Check("shared batches", 3, impossible),)

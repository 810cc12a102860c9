"""The detectors of rollouts: engines that differ, or are far from the trainer."""

from rankscope.bus.detector import Detector, RunFacts
from rankscope.evidence.rollouts.gaps import DifferentRollouts, GrossRollouts


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (
        DifferentRollouts(run.num_workers, run.hosts),
        GrossRollouts(run.num_workers),
    )

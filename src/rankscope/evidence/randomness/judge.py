"""The detector of shared random numbers."""

from rankscope.bus.detector import Detector, RunFacts
from rankscope.evidence.randomness.equal import EqualRandom
from rankscope.evidence.randomness.restart import RandomRestart


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return EqualRandom(run.num_workers, run.plan), RandomRestart(run.num_workers)

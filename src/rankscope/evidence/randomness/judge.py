"""What judges random generators."""

from rankscope.bus.detector import Detector
from rankscope.bus.run import RunFacts
from rankscope.evidence.randomness.equal import EqualRandom


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return what looks for faults in a run."""
    return (EqualRandom(run.num_workers, run.plan),)

"""What judges canaries."""

from rankscope.bus.run import RunFacts
from rankscope.diagnose.canary import CanaryVerdicts
from rankscope.diagnose.evidence import Detector


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return what looks for faults in a run."""
    return (CanaryVerdicts(run.num_workers, run.flagged.steadily),)

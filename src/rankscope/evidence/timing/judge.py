"""What judges times: who keeps the others waiting."""

from rankscope.bus.run import RunFacts
from rankscope.diagnose.evidence import Detector
from rankscope.diagnose.stragglers import Stragglers


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return what looks for faults in a run."""
    return (Stragglers(run.num_workers, run.hosts),)

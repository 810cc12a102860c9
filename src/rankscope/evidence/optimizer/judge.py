"""The detectors of optimizer state that a session does not begin with as it should."""

from rankscope.bus.detector import Detector, RunFacts
from rankscope.evidence.optimizer.lost import LostUpdates
from rankscope.evidence.optimizer.start import OptimizerStart


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return OptimizerStart(), LostUpdates()

"""The detector of a spread over workers that sampling does not explain."""

from rankscope.bus.detector import Detector, RunFacts
from rankscope.evidence.dispersion.sampling import Sampling


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (Sampling(run.num_workers, run.flagged.now),)

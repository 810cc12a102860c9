"""The detectors of times: workers that keep the others waiting."""

from rankscope.bus.detector import Check, CheckedRun, Detector, RunFacts
from rankscope.evidence.timing.stragglers import WARM_UP, WINDOW, Stragglers


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (Stragglers(run.num_workers, run.hosts),)


def make_checks(run: CheckedRun) -> tuple[Check, ...]:
    """Return the checks of a run."""
    return (Check("slow workers", WARM_UP + WINDOW),)

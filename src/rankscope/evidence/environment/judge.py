"""The detectors of environments and optimizer settings."""

from rankscope.bus.detector import Detector
from rankscope.bus.run import RunFacts
from rankscope.evidence.environment.mismatch import DifferentModes, EnvironmentMismatch
from rankscope.evidence.environment.settings import DifferentSettings, PlannedSeed, ScheduleByPass


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (
        EnvironmentMismatch(run.environments),
        DifferentModes(),
        DifferentSettings(run.num_workers, run.plan),
        ScheduleByPass(),
        PlannedSeed(run.plan.seed, run.sampler_seeds),
    )

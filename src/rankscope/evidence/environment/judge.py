"""The detectors of environments and optimizer settings."""

from rankscope.bus.detector import Detector, RunFacts
from rankscope.evidence.environment.mismatch import DifferentModes, DropoutOff, EnvironmentMismatch
from rankscope.evidence.environment.schedule import ScheduleByPass, ScheduleEnded, ScheduleJump
from rankscope.evidence.environment.settings import DifferentSettings, PlannedSeed


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (
        EnvironmentMismatch(run.environments),
        DifferentModes(),
        DropoutOff(),
        DifferentSettings(run.num_workers, run.plan),
        ScheduleByPass(),
        ScheduleEnded(),
        ScheduleJump(),
        PlannedSeed(run.plan.seed, run.sampler_seeds),
    )

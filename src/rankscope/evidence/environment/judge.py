"""What judges environments and the optimizer's settings."""

from rankscope.bus.run import RunFacts
from rankscope.diagnose.environment import EnvironmentMismatch
from rankscope.diagnose.evidence import Detector
from rankscope.diagnose.settings import DifferentSettings, PlannedSeed


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return what looks for faults in a run."""
    return (
        EnvironmentMismatch(run.environments),
        DifferentSettings(run.num_workers, run.plan),
        PlannedSeed(run.plan.seed, run.sampler_seeds),
    )

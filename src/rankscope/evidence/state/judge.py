"""What judges state: digests that should agree, and parameters that never change."""

from rankscope.bus.run import RunFacts
from rankscope.diagnose.evidence import Detector
from rankscope.diagnose.learning import NotUpdated
from rankscope.diagnose.unequal import UnequalState


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return what looks for faults in a run."""
    plan = run.plan
    return (
        UnequalState(
            run.num_workers,
            local_buffers=plan.local_buffers,
            local_steps=plan.local_steps or 0,
            replicated=plan.replicated,
            by_loop=run.by_loop,
        ),
        NotUpdated(),
    )

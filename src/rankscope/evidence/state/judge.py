"""The detectors of state: digests that should agree, and parameters that never change."""

from rankscope.bus.detector import Check, CheckedRun, Detector, RunFacts
from rankscope.evidence.state.learning import MovesInPasses, NotUpdated
from rankscope.evidence.state.unequal import UnequalState

STATE_STEPS = 64
"""Steps of one cycle through parameters, buffers and optimizer state."""


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    plan = run.plan
    return (
        UnequalState(
            run.num_workers,
            local_buffers=plan.local_buffers,
            local_steps=plan.local_steps or 0,
            replicated=plan.replicated,
            by_loop=run.by_loop,
            unsaved=run.unsaved_buffers,
        ),
        NotUpdated(),
        MovesInPasses(),
    )


def make_checks(run: CheckedRun) -> tuple[Check, ...]:
    """Return the checks of a run."""
    impossible = "" if run.options.get("evidence", True) else "evidence=False"
    return (Check("parameters, buffers and optimizer state", STATE_STEPS, impossible),)

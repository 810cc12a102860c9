"""The detectors of clipping: one factor on all ranks, and one norm after it."""

from rankscope.bus.detector import Detector, RunFacts
from rankscope.evidence.clipping.laws import ClippedBetween, FactorLaw, NormLaw, StageNorm


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    if run.plan.local_steps or run.by_loop:
        return ()
    planned = run.plan.max_norm
    return FactorLaw(), NormLaw(planned), StageNorm(planned), ClippedBetween()

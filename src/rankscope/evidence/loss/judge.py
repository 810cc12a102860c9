"""The detectors of losses: weighting, scale, values that are not finite, no gradient."""

from rankscope.bus.detector import Check, CheckedRun, Detector, RunFacts
from rankscope.evidence.loss.nonfinite import NoGradient, NonFinite, PartsWithoutGradient
from rankscope.evidence.loss.scale import LossScale
from rankscope.evidence.loss.weighting import LEAST_STEPS, TokenWeighting


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (
        NonFinite(),
        NoGradient(run.num_workers),
        PartsWithoutGradient(),
        TokenWeighting(run.num_workers, run.plan.loss_weighting),
        LossScale(run.num_workers, max(run.world_size // run.num_workers, 1), by_loop=run.by_loop),
    )


def make_checks(run: CheckedRun) -> tuple[Check, ...]:
    """Return the checks of a run."""
    return (
        Check("values that are not finite", 1),
        Check("the weights of workers in the average", LEAST_STEPS),
    )

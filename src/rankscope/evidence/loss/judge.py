"""What judges losses: weighting, scale, values that are not finite, no gradient."""

from rankscope.bus.run import RunFacts
from rankscope.diagnose.evidence import Detector
from rankscope.diagnose.loss_scale import LossScale
from rankscope.diagnose.nonfinite import NoGradient, NonFinite
from rankscope.diagnose.weighting import TokenWeighting


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return what looks for faults in a run."""
    return (
        NonFinite(),
        NoGradient(run.num_workers),
        TokenWeighting(run.num_workers, run.plan.loss_weighting),
        LossScale(run.num_workers),
    )

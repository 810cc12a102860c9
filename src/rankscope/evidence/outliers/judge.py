"""What judges workers that differ from the others, or are too much alike."""

from rankscope.bus.run import RunFacts
from rankscope.diagnose.alike import AlikePairs
from rankscope.diagnose.amounts import UnequalAmounts
from rankscope.diagnose.evidence import Detector
from rankscope.diagnose.outliers import WorkerOutliers


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return what looks for faults in a run."""
    outliers = WorkerOutliers(run.num_workers, run.hosts)
    run.flagged.now = lambda: outliers.set_apart
    run.flagged.steadily = lambda: outliers.steadily_apart
    run.flagged.left_out = lambda: outliers.not_compared
    return (
        outliers,
        UnequalAmounts(run.num_workers, run.hosts),
        AlikePairs(run.num_workers, run.flagged.left_out),
    )

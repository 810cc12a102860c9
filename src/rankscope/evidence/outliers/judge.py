"""The detectors of workers that differ from the others, or are too much alike."""

from functools import cache

import numpy as np

from rankscope.bus.detector import Check, CheckedRun, Detector, RunFacts
from rankscope.bus.step import MAX_PAIRED_WORKERS
from rankscope.evidence.outliers.alike import AlikePairs
from rankscope.evidence.outliers.amounts import UnequalAmounts
from rankscope.evidence.outliers.outliers import WorkerOutliers
from rankscope.evidence.outliers.parts import SignalSet, total_signals
from rankscope.stats.budget import OUTLIERS, alarm_level

MOST_STEPS = 64
"""Limit of :func:`fewest_steps`."""


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    outliers = WorkerOutliers(run.num_workers, run.hosts)
    run.flagged.now = lambda: outliers.flagged
    run.flagged.steadily = lambda: outliers.steadily_flagged
    run.flagged.left_out = lambda: outliers.not_compared
    return (
        outliers,
        UnequalAmounts(run.num_workers, run.hosts),
        AlikePairs(run.num_workers, run.flagged.left_out),
    )


def make_checks(run: CheckedRun) -> tuple[Check, ...]:
    """Return the checks of a run."""
    return (Check("a worker that differs from the others", fewest_steps(run.num_workers)),)


@cache
def fewest_steps(num_workers: int) -> int:
    """Return how many steps the search for outliers needs at least.

    The detector itself is run on one worker that is farthest out in every signal. Small
    differences take longer.
    """
    if num_workers < 2:
        return 0
    num_workers = min(num_workers, MAX_PAIRED_WORKERS)
    part = SignalSet(num_workers, total_signals())
    noise = np.random.default_rng(0)
    sizes_W = np.zeros(num_workers)
    level = alarm_level(OUTLIERS / 2)
    for step in range(MOST_STEPS):
        values_SW = 1 + 0.05 * noise.standard_normal((len(part.signals), num_workers))
        values_SW[:, 0] = 3.0
        next(part.observe(values_SW[None], sizes_W[None], [step]))
        if part.test.evidence >= level:
            return step + 1
    return MOST_STEPS

"""Several updates from one rollout: what is special about its samples counts once."""

from dataclasses import replace

import numpy as np

from rankscope.bus.step import StepReport
from rankscope.evidence.outliers.judge import RecentVisits, WorkerOutliers
from support.stepping import evidence_of
from support.streams import gathered

WORKERS, UPDATES, SAMPLES = 2, 8, 32


def rollouts(seed, *, again):
    """Yield steps whose losses depend on each worker's rollout, with its samples or others."""
    rng = np.random.default_rng(seed)
    for number in range(50):
        own_W = 2 + 0.3 * rng.standard_normal(WORKERS)
        kept_WN = rng.integers(1 << 60, size=(WORKERS, SAMPLES))
        for update in range(UPDATES):
            if not again:
                kept_WN = rng.integers(1 << 60, size=(WORKERS, SAMPLES))
            drawn = [rng.permutation(kept)[: SAMPLES // 2] for kept in kept_WN]
            loss_W = own_W + 0.01 * rng.standard_normal(WORKERS)
            step = gathered(UPDATES * number + update, drawn, loss=loss_W)
            yield StepReport(replace(step, observed=True), {})


def test_a_rollout_is_no_new_evidence_in_each_of_its_updates():
    found = [len(evidence_of(WorkerOutliers(WORKERS), *rollouts(s, again=True))) for s in range(5)]
    assert found == [0] * 5
    alone = [len(evidence_of(WorkerOutliers(WORKERS), *rollouts(s, again=False))) for s in range(5)]
    assert min(alone) > 0  # else the streams above would prove nothing


def test_samples_that_are_dealt_anew_count_in_each_epoch():
    rng = np.random.default_rng(0)
    visits = RecentVisits()
    for _ in range(6):
        order = rng.permutation(8 * 4 * 16).reshape(8, 4, 16)  # steps, workers, samples
        assert not any(visits.observe(list(drawn)) for drawn in order)
    fixed = np.arange(8 * 4 * 16).reshape(8, 4, 16)
    visits = RecentVisits()
    assert not any(visits.observe(list(drawn)) for drawn in fixed)
    assert all(visits.observe(list(drawn)) for drawn in fixed)

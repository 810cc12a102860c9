from dataclasses import replace

import numpy as np
import pytest

from rankscope.bus.detector import RunFacts
from rankscope.bus.finding import Severity
from rankscope.bus.step import StepReport
from rankscope.evidence.outliers.judge import RecentVisits, UnequalAmounts, WorkerOutliers
from rankscope.evidence.outliers.parts import SizeEffect
from rankscope.verdict.diagnosis import Diagnosis
from support.stepping import evidence_of
from support.streams import gathered


def told_of(num_workers, columns_of, steps, detector=None, first=0):
    steps, none = range(first, first + steps), [[]] * num_workers
    reports = (StepReport(gathered(step, none, **columns_of(step)), {}) for step in steps)
    return evidence_of(detector or UnequalAmounts(num_workers), *reports)


@pytest.mark.parametrize(
    ("width", "column", "usual", "own"),
    [
        (2, "loss_weight", 512, 256),
        (4, "num_samples", 8, 4),
        (8, "sequence_length", 128, 256),
        (4, "padding", 0.0, 0.5),
    ],
)
def test_a_worker_that_is_given_another_amount_is_named_within_25_steps(width, column, usual, own):
    detector = UnequalAmounts(width)

    def columns(step):
        values = np.full(width, float(usual))
        values[-1] = own if step >= 100 else usual
        return {column: values}

    assert told_of(width, columns, 100, detector) == []
    told = told_of(width, columns, 25 if width > 2 else 40, detector, first=100)
    assert {one.ranks for one in told} == {(width - 1,) if width > 2 else (0, 1)}
    expected = ("data.worker_outlier", Severity.WARNING)
    if width == 2:
        expected = ("inconclusive", Severity.NOTE)
    assert {(one.cause, one.severity) for one in told} == {expected}
    assert told[0].first_step == 100


def test_an_epochs_last_batch_is_short_on_the_same_worker_each_time():
    def columns(step):
        last = 1 if step % 12 == 11 else 4
        return {"num_samples": [4, 4, 4, last], "loss_weight": [128, 128, 128, 32 * last]}

    assert told_of(4, columns, 600) == []


def test_lengths_that_differ_from_batch_to_batch_are_healthy():
    """Padded to the longest of each batch, with a long tail and a curriculum."""
    width, batch = 8, 1
    rng = np.random.default_rng(width)

    def columns(step):
        lengths = (1 + step / 2000) * 80 * np.exp(0.8 * rng.standard_normal((width, batch)))
        longest = lengths.max(axis=1)
        return {
            "loss_weight": lengths.sum(axis=1).round(),
            "sequence_length": longest.round(),
            "padding": 1 - lengths.mean(axis=1) / longest,
        }

    assert told_of(width, columns, 600) == []


def test_a_sampler_that_deals_sorted_lengths_by_rank_is_healthy():
    """As that of Transformers does: rank 0 has the longest of each few samples in every step."""
    width, batch, steps, rng = 4, 1, 50, np.random.default_rng(1)
    dealt = []
    for _ in range(20):
        lengths = np.sort(80 * np.exp(0.5 * rng.standard_normal(steps * batch * width)))[::-1]
        dealt += list(lengths.reshape(steps, batch, width))

    def columns(step):
        return {"loss_weight": dealt[step].sum(axis=0), "sequence_length": dealt[step].max(axis=0)}

    assert told_of(width, columns, 1000) == []


def test_amounts_that_differ_by_worker_are_a_note_and_hide_no_other_fault():
    """Domains of other lengths on each worker; then the labels of one are wrong."""
    rng, diagnosis, told = np.random.default_rng(0), Diagnosis(RunFacts(4)), []
    for step in range(160):
        losses = 2 + 0.1 * rng.standard_normal(4)
        losses[2] *= 1.5 if step >= 80 else 1
        columns = {"loss": losses, "loss_weight": [100, 400, 400, 100]}
        told += diagnosis.observe(StepReport(gathered(step, [[]] * 4, **columns), {}))
    severe = {(one.id, one.ranks) for one in told if one.severity > Severity.NOTE}
    assert severe == {("outlier-1", (2,))}
    assert any(one.id == "amounts-differ" for one in told)


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
    found = [len(evidence_of(WorkerOutliers(WORKERS), *rollouts(s, again=True))) for s in range(3)]
    assert found == [0] * 3
    alone = [len(evidence_of(WorkerOutliers(WORKERS), *rollouts(s, again=False))) for s in range(3)]
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


UNITS = 8
BOTH = np.array([True, False])  # the first signal follows a power, the second the logarithm


def step(rng, sizes_U, noise=0.0):
    scatter = noise * rng.standard_normal((2, len(sizes_U)))
    return np.array([3 * np.exp(0.6 * sizes_U + scatter[0]), 0.4 - 0.2 * sizes_U + scatter[1]])


def free(effect, values, sizes_U):
    [left] = effect.adjust(values[None], sizes_U[None])
    return left


def taught(rng):
    effect = SizeEffect(BOTH, UNITS)
    for _ in range(100):
        sizes_U = 5 + 0.3 * rng.standard_normal(UNITS)
        free(effect, step(rng, sizes_U, noise=0.05), sizes_U)
    return effect


def test_what_follows_sizes_is_taken_away():
    rng = np.random.default_rng(0)
    effect = taught(rng)
    sizes_U = 5 + 0.3 * np.arange(UNITS)
    left = free(effect, step(rng, sizes_U), sizes_U)
    middle = np.median(sizes_U)
    np.testing.assert_allclose(left[0], 3.0 * np.exp(0.6 * middle), rtol=0.05)
    np.testing.assert_allclose(left[1], 0.4 - 0.2 * middle, atol=0.05)


def test_the_units_stay_exchangeable():
    """To permute values and sizes of a step together permutes what is left."""
    rng = np.random.default_rng(2)
    sizes_U, order = rng.standard_normal(UNITS), rng.permutation(UNITS)
    values = step(rng, sizes_U, noise=0.3)
    left = free(taught(np.random.default_rng(3)), values, sizes_U)
    permuted = free(taught(np.random.default_rng(3)), values[:, order], sizes_U[order])
    np.testing.assert_array_equal(permuted, left[:, order])


def test_a_fault_stays_whole():
    rng = np.random.default_rng(5)
    effect = SizeEffect(BOTH, UNITS)
    for _ in range(100):
        sizes_U = 5 + 0.3 * rng.standard_normal(UNITS)
        sizes_U[6] += 0.4  # the faulty one has larger batches, too
        values = step(rng, sizes_U, noise=0.05)
        values[0, 6] *= 1.5
        left = free(effect, values, sizes_U)
    assert left[0, 6] / np.median(left[0]) == pytest.approx(1.5, rel=0.15)

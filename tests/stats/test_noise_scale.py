"""Noise of gradients from norms alone, and ratios over steps with their intervals."""

import math

import numpy as np
import pytest

from rankscope.stats import noise_scale as noise

WORKERS, MICRO, SIZE = 4, 3, 200
TRUTH = np.linspace(-0.3, 0.5, SIZE)
STD = np.linspace(0.5, 2.0, SIZE)
SIGNAL, NOISE = float(TRUTH @ TRUTH), float(STD @ STD)


def test_healthy_workers_give_the_true_noise_and_signal():
    steps, rng = 400, np.random.default_rng(0)
    micro_TWMP = TRUTH + STD * rng.standard_normal((steps, WORKERS, MICRO, SIZE))
    local_TWP = micro_TWMP.mean(axis=2)
    sums_TW = np.ones((steps, WORKERS))
    found = noise.noise_of_steps(
        np.square(local_TWP).sum(axis=2).mean(axis=1),
        np.linalg.norm(local_TWP.mean(axis=1), axis=1),
        np.square(micro_TWMP).sum(axis=(2, 3)).mean(axis=1),
        np.full(steps, MICRO),
        noise.micro_shares(sums_TW, sums_TW / MICRO, np.full(steps, MICRO)),
        WORKERS,
    )
    assert found.noise_T.mean() == pytest.approx(NOISE, rel=0.02)
    assert found.signal_T.mean() == pytest.approx(SIGNAL, rel=0.05)
    assert found.between_T.mean() == pytest.approx(NOISE / MICRO, rel=0.02)
    assert found.within_T.mean() == pytest.approx(NOISE / MICRO, rel=0.02)
    assert found.units_T.mean() == WORKERS * MICRO


def test_shares_of_micro_batches():
    shares = noise.micro_shares(
        np.array([[1.0, 1.0], [2.0, 2.0], [-3.0, 3.0], [1.0, 1.1], [1.0, 1.0005]]),
        np.array([[0.5, 0.82], [2.0, 3.28], [4.5, 4.5], [0.9, 0.9], [0.5, 0.5]]),
        np.full(5, 2),
    )
    assert shares == pytest.approx([0.66, 0.66, 0.5, 0.5, 0.5], abs=1e-3)


def test_an_interval_turned_round():
    found = noise.noise_scale(noise.Estimate(0.5, 0.25, 1.0))
    assert (found.value, found.low, found.high) == (2.0, 1.0, 4.0)
    open_ended = noise.noise_scale(noise.Estimate(0.1, -0.1, 0.3))
    assert open_ended.high == math.inf
    assert open_ended.low == pytest.approx(1 / 0.3)
    hidden = noise.noise_scale(noise.Estimate(-0.1, -0.3, 0.2))
    assert (hidden.value, hidden.low, hidden.high) == (math.inf, 5.0, math.inf)
    assert math.isnan(noise.noise_scale(noise.Estimate(0.5)).low)


@pytest.mark.parametrize(("steps", "blocks"), [(1, 1), (64, 64), (65, 33), (129, 65), (1000, 63)])
def test_no_step_is_lost_and_there_are_few_blocks(steps, blocks):
    pairs_T2 = np.random.default_rng(steps).random((steps, 2))
    sums_B2 = noise.block_sums(*pairs_T2.T)
    np.testing.assert_allclose(sums_B2.sum(axis=0), pairs_T2.sum(axis=0))
    assert len(sums_B2) == blocks <= noise.MOST_BLOCKS + 1


def test_the_interval_is_the_textbook_jackknife():
    sums = 1e-9 * np.random.default_rng(0).gamma(3.0, 1.0, (20, 2))
    n, d = sums.sum(axis=0)
    left_out = [math.sqrt((n - a) / (d - b)) for a, b in sums]
    mean = math.fsum(left_out) / 20
    error = math.sqrt(19 / 20 * math.fsum((x - mean) ** 2 for x in left_out))
    found = noise.ratio_of_sums(sums, root=True)
    assert found.value == pytest.approx(math.sqrt(n / d))
    assert found.high == pytest.approx(found.value + 2.093 * error, rel=1e-4)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Scaled chi-square variances, whose level wanders from step to step, of ratio 1."""
    rng = np.random.default_rng(1)
    covered, num_runs = 0, 400
    for _ in range(num_runs):
        level = np.exp(rng.normal(0, 0.5, 150))
        pairs = np.stack([level * rng.chisquare(7, 150) / 7, level * rng.chisquare(24, 150) / 24])
        found = noise.ratio_of_sums(noise.block_sums(*pairs), root=True)
        covered += found.low <= 1 <= found.high
    assert 0.92 < covered / num_runs < 0.98


@pytest.mark.parametrize(("degrees", "quantile"), [(7, 2.3646), (63, 1.9983)])
def test_quantiles_of_student(degrees, quantile):
    assert noise.student_975(degrees) == pytest.approx(quantile, abs=1e-3)

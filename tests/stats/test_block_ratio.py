"""Ratios over steps: against plain sums, the textbook jackknife, and simulated coverage."""

import math

import numpy as np
import pytest

from rankscope.stats.noise_scale import MOST_BLOCKS, block_sums, ratio_of_sums, student_975


@pytest.mark.parametrize(
    ("num_steps", "num_blocks"), [(1, 1), (64, 64), (65, 33), (129, 65), (1000, 63)]
)
def test_no_step_is_lost_and_there_are_few_blocks(num_steps, num_blocks):
    pairs_T2 = np.random.default_rng(num_steps).random((num_steps, 2))
    sums_B2 = block_sums(*pairs_T2.T)
    np.testing.assert_allclose(sums_B2.sum(axis=0), pairs_T2.sum(axis=0))
    assert len(sums_B2) == num_blocks <= MOST_BLOCKS + 1


def test_the_interval_is_the_textbook_jackknife():
    sums = 1e-9 * np.random.default_rng(0).gamma(3.0, 1.0, (20, 2))
    n, d = sums.sum(axis=0)
    left_out = [math.sqrt((n - a) / (d - b)) for a, b in sums]
    mean = math.fsum(left_out) / 20
    error = math.sqrt(19 / 20 * math.fsum((x - mean) ** 2 for x in left_out))
    found = ratio_of_sums(sums, root=True)
    assert found.value == pytest.approx(math.sqrt(n / d))
    assert found.high == pytest.approx(found.value + 2.093 * error, rel=1e-4)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Scaled chi-square variances, whose level wanders from step to step, of ratio 1."""
    rng = np.random.default_rng(1)
    covered, num_runs = 0, 400
    for _ in range(num_runs):
        level = np.exp(rng.normal(0, 0.5, 150))
        pairs = np.stack([level * rng.chisquare(7, 150) / 7, level * rng.chisquare(24, 150) / 24])
        found = ratio_of_sums(block_sums(*pairs), root=True)
        covered += found.low <= 1 <= found.high
    assert 0.92 < covered / num_runs < 0.98


@pytest.mark.parametrize(("degrees", "quantile"), [(7, 2.3646), (63, 1.9983)])
def test_quantiles_of_student(degrees, quantile):
    assert student_975(degrees) == pytest.approx(quantile, abs=1e-3)

"""Ratios over streams: against plain sums, the textbook jackknife, and simulated coverage."""

import math

import numpy as np
import pytest

from rankscope.core.block_ratio import (
    CAPACITY,
    BlockRatio,
    Estimate,
    difference,
    ratio_of_sums,
    student_975,
)


def fill(pairs):
    blocks = BlockRatio()
    for numerator, denominator in pairs:
        blocks.add(numerator, denominator)
    return blocks


@pytest.mark.parametrize("num_steps", [1, 7, 63, 64, 65, 129, 200, 1000])
def test_no_step_is_lost_and_memory_stays_bounded(num_steps):
    pairs = np.random.default_rng(num_steps).random((num_steps, 2))
    blocks = fill(pairs)
    np.testing.assert_allclose(blocks.sums().sum(axis=0), pairs.sum(axis=0))
    assert len(blocks.sums()) <= CAPACITY + 1
    if num_steps >= CAPACITY:
        assert blocks.complete >= CAPACITY // 2
    earlier, later = blocks.halves()
    assert 0 <= len(later) - len(earlier) <= 1


def test_blocks_hold_consecutive_steps_of_equal_number():
    blocks = fill([(float(t), 1.0) for t in range(300)])
    lengths = blocks.sums()[:, 1]
    assert set(lengths[:-1]) == {8.0}
    assert (np.diff(blocks.sums()[:-1, 0]) > 0).all()


def test_steps_that_are_not_finite_are_left_out():
    blocks = fill([(1.0, 2.0), (math.nan, 1.0), (3.0, math.inf), (5.0, 1.0)])
    assert blocks.sums().sum(axis=0).tolist() == [6.0, 3.0]


@pytest.mark.parametrize("unit", [1.0, 1e-9])
def test_the_interval_is_the_textbook_jackknife(unit):
    sums = unit * np.random.default_rng(0).gamma(3.0, 1.0, (20, 2))
    n, d = sums.sum(axis=0)
    left_out = [math.sqrt((n - a) / (d - b)) for a, b in sums]
    mean = math.fsum(left_out) / 20
    error = math.sqrt(19 / 20 * math.fsum((x - mean) ** 2 for x in left_out))
    found = ratio_of_sums(sums, root=True)
    assert found.value == pytest.approx(math.sqrt(n / d))
    assert found.error == pytest.approx(error)
    assert found.high == pytest.approx(found.value + 2.093 * error, rel=1e-4)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Scaled chi-square variances, whose level wanders from step to step, of ratio 1."""
    rng = np.random.default_rng(1)
    covered, num_runs = 0, 400
    for _ in range(num_runs):
        level = np.exp(rng.normal(0, 0.5, 150))
        pairs = np.stack([level * rng.chisquare(7, 150) / 7, level * rng.chisquare(24, 150) / 24])
        found = ratio_of_sums(fill(pairs.T).sums(), root=True)
        covered += found.low <= 1 <= found.high
    assert 0.92 < covered / num_runs < 0.98


def test_the_error_shrinks_with_the_root_of_the_number_of_steps():
    rng = np.random.default_rng(2)
    errors = [
        np.mean([ratio_of_sums(fill(rng.gamma(2, 1, (n, 2))).sums()).error for _ in range(20)])
        for n in (100, 1600)
    ]
    assert errors[0] / errors[1] == pytest.approx(4.0, rel=0.15)


def test_a_numerator_of_nothing_is_certain():
    found = ratio_of_sums(fill([(0.0, 1.0)] * 30).sums(), root=True)
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)


def test_without_a_denominator_or_enough_blocks():
    assert math.isnan(ratio_of_sums(np.zeros((0, 2))).value)
    assert math.isnan(ratio_of_sums(np.zeros((20, 2))).value)
    few = ratio_of_sums(np.ones((7, 2)))
    assert few.value == 1.0
    assert math.isnan(few.low)


def test_difference_in_standard_errors():
    assert difference(Estimate(1.0, 0.3), Estimate(2.0, 0.4)) == pytest.approx(2.0)
    assert difference(Estimate(1.0, 0.0), Estimate(0.5, 0.0)) == -math.inf
    assert difference(Estimate(1.0), Estimate(1.0)) == 0.0
    assert math.isnan(difference(Estimate(1.0), Estimate(2.0, 0.1)))


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(7, 2.3646), (15, 2.1314), (30, 2.0423), (63, 1.9983)]
)
def test_quantiles_of_student(degrees, quantile):
    assert student_975(degrees) == pytest.approx(quantile, abs=1e-3)

"""The null of dispersion: against textbook loops, and against simulated sampling."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.stats.noise_scale import block_sums, ratio_of_sums
from rankscope.stats.spread import expected_std, population_std
from support.losses import mean_and_sem

NAN = float("nan")
units = st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 300)), max_size=12)


def naive(pairs):
    kept = [(value, weight) for value, weight in pairs if weight > 0]
    total = sum(weight for _, weight in kept)
    if not kept:
        return NAN, NAN
    mean = math.fsum(value * weight for value, weight in kept) / total
    if len(kept) == 1:
        return mean, NAN
    variance = math.fsum(
        (weight / total * (value - mean)) ** 2 / (1 - weight / total) for value, weight in kept
    )
    return mean, math.sqrt(variance)


@given(units)
def test_mean_and_standard_error_agree_with_a_naive_loop(pairs):
    values = np.array([value for value, _ in pairs])
    weights = np.array([weight for _, weight in pairs], np.float64)
    np.testing.assert_allclose(mean_and_sem(values, weights), naive(pairs), atol=1e-12)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_equal_weights_give_the_usual_standard_error(values):
    array = np.array(values)
    mean, sem = mean_and_sem(array, np.full(len(array), 7.0))
    assert mean == pytest.approx(array.mean(), abs=1e-12)
    assert sem == pytest.approx(array.std(ddof=1) / math.sqrt(len(array)), abs=1e-12)


def test_units_without_label_tokens_are_left_out_whatever_their_loss():
    found = mean_and_sem(np.array([1.0, np.nan, 3.0]), np.array([1.0, 0.0, 1.0]))
    assert found == (2.0, 1.0)


def test_a_unit_with_all_the_weight_to_rounding_has_next_to_no_error():
    found = mean_and_sem(np.array([2.0, 5.0]), np.array([1e20, 1.0]))
    np.testing.assert_allclose(found, (2.0, 0.0), atol=1e-15)


def test_unknown_weights_count_all_units_alike():
    assert mean_and_sem(np.array([1.0, 3.0]), np.array([np.nan, 9.0])) == (2.0, 1.0)


@pytest.mark.parametrize(("value", "mean"), [(np.inf, np.inf), (-np.inf, -np.inf), (NAN, NAN)])
def test_a_unit_that_is_not_finite_shows_in_the_mean(value, mean):
    found = mean_and_sem(np.array([value, 1.0]), np.ones(2))
    np.testing.assert_equal(found, (mean, NAN))


@pytest.mark.parametrize("weight", [-1.0, np.inf])
def test_weights_that_make_no_sense_give_no_mean(weight):
    assert all(map(math.isnan, mean_and_sem(np.ones(2), np.array([1.0, weight]))))


def test_values_and_weights_must_match():
    with pytest.raises(ValueError, match="one weight per value"):
        mean_and_sem(np.ones(2), np.ones(3))


def test_expected_std_by_hand_and_without_enough_workers():
    assert expected_std(np.array([3.0, 4.0])) == pytest.approx(math.sqrt(25 / 2 / 2))
    assert expected_std(np.array([3.0, NAN, 4.0])) == expected_std(np.array([3.0, 4.0]))
    assert expected_std(np.array([0.0, 0.0])) == 0.0
    assert math.isnan(expected_std(np.array([3.0, NAN])))
    assert math.isnan(expected_std(np.empty(0)))


def dispersion_ratio(observed_stds, expected_stds):
    """Return observed over expected dispersion, over steps where both are finite."""
    return ratio_of_sums(block_sums(observed_stds**2, expected_stds**2), root=True).value


def test_ratio_by_hand_and_without_a_null():
    observed, expected = np.array([3.0, NAN, 4.0, 1.0]), np.array([1.0, 5.0, 2.0, NAN])
    assert dispersion_ratio(observed, expected) == pytest.approx(5.0 / math.sqrt(5.0))
    assert math.isnan(dispersion_ratio(np.ones(3), np.full(3, NAN)))
    assert math.isnan(dispersion_ratio(np.ones(3), np.zeros(3)))


def simulated_ratio(num_steps, num_units, shift=0.0, shared=False):
    """Four workers whose units have token counts and skewed losses; one may be shifted."""
    rng = np.random.default_rng(num_steps * 31 + num_units)
    observed, expected = np.empty(num_steps), np.empty(num_steps)
    for t in range(num_steps):
        weights = rng.integers(10, 60, (4, num_units)).astype(float)
        values = rng.gamma(4.0, 0.5, (4, num_units)) * (30 / weights) ** 0.2
        if shared:
            weights[:], values[:] = weights[0], values[0]
        values[0] += shift
        pairs = [mean_and_sem(v, w) for v, w in zip(values, weights, strict=True)]
        means, sems = np.array(pairs).T
        observed[t], expected[t] = population_std(means), expected_std(sems)
    return dispersion_ratio(observed, expected)


def test_sampling_alone_gives_a_ratio_near_one_and_nearer_with_more_data():
    assert abs(simulated_ratio(400, 16) - 1) < 0.1
    assert abs(simulated_ratio(6400, 16) - 1) < 0.03


def test_shared_data_lowers_the_ratio_and_different_data_raise_it():
    assert simulated_ratio(100, 8, shared=True) == 0.0
    assert simulated_ratio(400, 16, shift=2.0) > 2.0


def test_the_standard_error_is_unbiased_when_one_long_sample_dominates():
    """Samples of 5 to 400 tokens whose losses vary inversely to their length."""
    rng = np.random.default_rng(0)
    weights = np.array([5.0, 20.0, 60.0, 400.0])
    losses = rng.normal(size=(40_000, 4)) / np.sqrt(weights)
    variances = [mean_and_sem(row, weights)[1] ** 2 for row in losses]
    truth = 1 / weights.sum()
    assert np.mean(variances) == pytest.approx(truth, rel=0.05)
    shares = weights / weights.sum()
    means = losses @ shares
    uncorrected = [
        4 / 3 * np.sum((shares * (row - m)) ** 2) for row, m in zip(losses, means, strict=True)
    ]
    assert np.mean(uncorrected) < 0.7 * truth

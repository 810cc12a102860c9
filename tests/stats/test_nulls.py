"""The null of dispersion: against textbook loops, and against simulated sampling."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankscope.stats.noise_scale import block_sums, ratio_of_sums
from rankscope.stats.spread import expected_std, population_std
from support.losses import mean_and_sem

NAN = float("nan")

units = st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 300)), max_size=12)


def dispersion_ratio(observed_stds, expected_stds):
    """Return observed over expected dispersion, over steps where both are finite."""
    return ratio_of_sums(block_sums(observed_stds**2, expected_stds**2), root=True).value


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
    assert abs(simulated_ratio(100, 16) - 1) < 0.2
    assert abs(simulated_ratio(1600, 16) - 1) < 0.05


def test_shared_data_lowers_the_ratio_and_different_data_raise_it():
    assert simulated_ratio(100, 8, shared=True) == 0.0
    assert simulated_ratio(100, 16, shift=2.0) > 2.0


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


def test_a_unit_with_all_the_weight_to_rounding_has_next_to_no_error():
    found = mean_and_sem(np.array([2.0, 5.0]), np.array([1e20, 1.0]))
    np.testing.assert_allclose(found, (2.0, 0.0), atol=1e-15)

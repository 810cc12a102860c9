"""The null of dispersion: against textbook loops, and against simulated sampling."""

import numpy as np

from rankscope.stats.noise_scale import block_sums, ratio_of_sums
from rankscope.stats.spread import expected_std, population_std
from support.losses import mean_and_sem


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

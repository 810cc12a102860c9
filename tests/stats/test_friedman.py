"""Friedman's test against its own definition and its level."""

import numpy as np
import pytest

from rankscope.stats.units import friedman


@pytest.mark.parametrize("shape", [(10, 3), (20, 7), (64, 63)])
@pytest.mark.parametrize("level", [0.01, 0.05])
def test_units_that_are_alike_differ_as_often_as_the_level_says(shape, level):
    rng = np.random.default_rng(shape[0])
    runs = 1000
    found = sum(not friedman(rng.standard_t(2, shape), level)[1] for _ in range(runs))
    assert found <= runs * level + 4 * np.sqrt(runs * level)
    assert found >= runs * level / 4


def test_the_statistic_is_that_of_the_textbook():
    """12/(n k (k+1)) · Σ R_j² − 3 n (k+1), for ranks from 1 without ties."""
    values = np.random.default_rng(0).standard_normal((12, 5))
    ranks = values.argsort(axis=1).argsort(axis=1) + 1
    n, k = values.shape
    expected = 12 / (n * k * (k + 1)) * (ranks.sum(axis=0) ** 2).sum() - 3 * n * (k + 1)
    z, _ = friedman(values, 0.01)
    assert (z**2).sum() * (k - 1) / k == pytest.approx(expected)


def test_steady_differences_are_seen_and_named():
    values = np.random.default_rng(1).standard_normal((30, 6))
    values[:, 4] += 2
    z, alike = friedman(values, 1e-4)
    assert not alike
    assert z.argmax() == 4


def test_ties_and_missing_values():
    assert friedman(np.ones((10, 4)), 0.5)[1]
    values = np.random.default_rng(2).standard_normal((10, 4))
    values[:7, 0] = np.nan
    assert friedman(values, 0.999)[1]  # three steps tell nothing
    assert not friedman(np.vstack([values, values[-1:]]), 0.999)[1]  # four do

"""Friedman's test against its own definition and its level."""

import numpy as np
import pytest

from rankscope.stats.units import friedman


@pytest.mark.parametrize(("shape", "level"), [((10, 3), 0.05), ((20, 7), 0.01)])
def test_units_that_are_alike_differ_as_often_as_the_level_says(shape, level):
    rng = np.random.default_rng(shape[0])
    runs = 1000
    found = sum(not friedman(rng.standard_t(2, shape), level)[1] for _ in range(runs))
    assert found <= runs * level + 4 * np.sqrt(runs * level)
    assert found >= runs * level / 4


def test_ties_and_missing_values():
    assert friedman(np.ones((10, 4)), 0.5)[1]
    values = np.random.default_rng(2).standard_normal((10, 4))
    values[:7, 0] = np.nan
    assert friedman(values, 0.999)[1]  # three steps tell nothing
    assert not friedman(np.vstack([values, values[-1:]]), 0.999)[1]  # four do

"""What is remembered of the recent steps."""

import numpy as np
import pytest

from rankscope.stats.units import RecentSteps, friedman

UNITS = 4


def test_every_signal_knows_the_numbers_of_its_steps():
    recent = RecentSteps(2, UNITS)
    steps = [*range(100), *range(128, 64 * 22, 64)]  # then measured in every 64th step alone
    for step in steps:
        rows = slice(0, 2 if step % 2 == 0 else 1)
        recent.remember(np.zeros((rows.stop, UNITS)), rows, step)
    assert [recent.step_of(0, back) for back in (0, 1, 19, 20, 63)] == [1344, 1280, 128, 99, 56]
    assert [recent.step_of(0, back) for back in (64, 119)] == [55, 0]  # as the two oldest lie
    assert [recent.step_of(1, back) for back in (0, 19, 20, 63, 64)] == [1344, 128, 98, 12, 10]


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

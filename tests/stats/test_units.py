"""What is remembered of the recent steps."""

import numpy as np
import pytest

from rankscope.stats.state import StateError
from rankscope.stats.units import RECENT, RecentSteps

UNITS = 4


def test_every_signal_has_its_own_steps_the_latest_first():
    recent = RecentSteps(2, UNITS)
    for step in range(3 * RECENT):
        rows = np.arange(2 if step % 3 == 0 else 1)  # the second signal in every third step alone
        recent.remember(np.array([np.full(UNITS, 10.0 * step + row) for row in rows]), rows, step)
    last = 3 * RECENT - 1
    np.testing.assert_array_equal(
        recent.deviations(0, 3)[:, 0], [10 * last, 10 * (last - 1), 10 * (last - 2)]
    )
    second = recent.deviations(1, 99)
    assert second.shape == (RECENT, UNITS)
    np.testing.assert_array_equal(second[:2, 0], [10 * (last - 2) + 1, 10 * (last - 5) + 1])


def test_every_signal_knows_the_numbers_of_its_steps():
    recent = RecentSteps(2, UNITS)
    steps = [*range(100), *range(128, 64 * 22, 64)]  # then measured in every 64th step alone
    for step in steps:
        rows = slice(0, 2 if step % 2 == 0 else 1)
        recent.remember(np.zeros((rows.stop, UNITS)), rows, step)
    assert [recent.step_of(0, back) for back in (0, 1, 19, 20, 63)] == [1344, 1280, 128, 99, 56]
    assert [recent.step_of(0, back) for back in (64, 119)] == [55, 0]  # as the two oldest lie
    assert [recent.step_of(1, back) for back in (0, 19, 20, 63, 64)] == [1344, 128, 98, 12, 10]


def test_few_steps_are_told_from():
    recent = RecentSteps(1, UNITS)
    recent.remember(np.zeros((1, UNITS)), slice(0, 1), 7)
    assert [recent.step_of(0, back) for back in range(3)] == [7, 6, 5]
    recent.remember(np.zeros((1, UNITS)), slice(0, 1), 15)
    assert [recent.step_of(0, back) for back in range(3)] == [15, 7, -1]


def test_what_it_remembers_survives_a_restart():
    rng = np.random.default_rng(0)
    before, after = RecentSteps(1, UNITS), RecentSteps(1, UNITS)
    for step in range(7):
        before.remember(rng.standard_normal((1, UNITS)), slice(0, 1), step)
    after.restore(before.state())
    np.testing.assert_array_equal(after.deviations(0, 99), before.deviations(0, 99))
    assert [after.step_of(0, back) for back in range(7)] == [6, 5, 4, 3, 2, 1, 0]


def test_a_state_without_step_numbers_is_refused():
    state = dict(RecentSteps(1, UNITS).state())
    del state["_steps"]
    with pytest.raises(StateError):
        RecentSteps(1, UNITS).restore(state)

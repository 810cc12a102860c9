"""What is remembered of the recent steps."""

import numpy as np

from rankscope.stats.units import RecentSteps

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

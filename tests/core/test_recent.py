"""What is remembered of the recent steps."""

import numpy as np

from rankscope.core.recent import RECENT, RecentSteps

UNITS = 4


def test_every_signal_has_its_own_steps_the_latest_first():
    recent = RecentSteps(2, UNITS)
    for step in range(3 * RECENT):
        rows = np.arange(2 if step % 3 == 0 else 1)  # the second signal in every third step alone
        recent.remember(np.array([np.full(UNITS, 10.0 * step + row) for row in rows]), rows)
    last = 3 * RECENT - 1
    np.testing.assert_array_equal(
        recent.deviations(0, 3)[:, 0], [10 * last, 10 * (last - 1), 10 * (last - 2)]
    )
    second = recent.deviations(1, 99)
    assert second.shape == (RECENT, UNITS)
    np.testing.assert_array_equal(second[:2, 0], [10 * (last - 2) + 1, 10 * (last - 5) + 1])


def test_what_it_remembers_survives_a_restart():
    rng = np.random.default_rng(0)
    before, after = RecentSteps(1, UNITS), RecentSteps(1, UNITS)
    for _ in range(7):
        before.remember(rng.standard_normal((1, UNITS)), slice(0, 1))
    after.restore(before.state())
    np.testing.assert_array_equal(after.deviations(0, 99), before.deviations(0, 99))

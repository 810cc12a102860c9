"""What is remembered of the recent steps, and what sizes explain of it."""

import numpy as np
import pytest

from rankscope.core.recent import RECENT, RecentSteps, without_size

UNITS = 4


def deviation(step, signal):
    return np.full(UNITS, 10.0 * step + signal)


def test_sizes_belong_to_the_steps_in_which_a_signal_was_measured():
    recent = RecentSteps(2, UNITS)
    for step in range(3 * RECENT):
        full = step % 3 == 0  # the second signal, and sizes, in every third step alone
        rows = np.arange(2 if full else 1)
        shown = np.array([deviation(step, signal) for signal in rows])
        recent.remember(shown, rows, np.full(UNITS, float(step)) if full else None)
    second = recent.deviations(1, RECENT)
    assert second.shape == (RECENT, UNITS)
    np.testing.assert_array_equal(recent.sizes(1, RECENT), (second - 1) / 10)
    first_T, sizes_T = recent.deviations(0, 10)[:, 0], recent.sizes(0, 10)[:, 0]
    known_T = np.isfinite(sizes_T)
    assert known_T.sum() == 3
    np.testing.assert_array_equal(sizes_T[known_T], first_T[known_T] / 10)


def test_sizes_that_have_been_forgotten_are_unknown():
    recent = RecentSteps(2, UNITS)
    both, one = np.arange(2), np.arange(1)
    recent.remember(np.zeros((2, UNITS)), both, np.ones(UNITS))
    for _ in range(RECENT):
        recent.remember(np.zeros((1, UNITS)), one, np.zeros(UNITS))
    assert recent.deviations(1, 5).shape == (1, UNITS)
    assert np.isnan(recent.sizes(1, 5)).all()


def test_what_it_remembers_survives_a_restart():
    rng = np.random.default_rng(0)
    before, after = RecentSteps(1, UNITS), RecentSteps(1, UNITS)
    for _ in range(7):
        before.remember(rng.standard_normal((1, UNITS)), slice(0, 1), rng.standard_normal(UNITS))
    after.restore(before.state())
    np.testing.assert_array_equal(after.deviations(0, 99), before.deviations(0, 99))
    np.testing.assert_array_equal(after.sizes(0, 99), before.sizes(0, 99))


def test_a_unit_has_no_say_in_what_its_size_explains():
    rng = np.random.default_rng(0)
    sizes_TU = rng.standard_normal((50, 8))
    centred_TU = sizes_TU - np.median(sizes_TU, axis=1, keepdims=True)
    deviations_TU = 0.4 * centred_TU
    deviations_TU[:, 2] += 3.0 + centred_TU[:, 2]
    left_TU, *_ = without_size(deviations_TU, sizes_TU, 2)
    np.testing.assert_allclose(np.delete(left_TU, 2, axis=1), 0, atol=1e-12)
    np.testing.assert_allclose(left_TU[:, 2], 3.0 + centred_TU[:, 2])


@pytest.mark.parametrize("size", [0.0, np.nan])
def test_sizes_that_do_not_differ_explain_nothing(size):
    sizes_TU = np.zeros((5, UNITS))
    sizes_TU[0, 1] = size
    deviations_TU = np.arange(5.0 * UNITS).reshape(5, UNITS)
    (left_TU,) = without_size(deviations_TU, sizes_TU, 0)
    np.testing.assert_array_equal(left_TU, deviations_TU)


def test_a_slope_is_known_up_to_its_standard_error():
    rng = np.random.default_rng(0)
    sizes_TU = rng.standard_normal((200, 8))
    relative_TU = sizes_TU - np.median(sizes_TU, axis=1, keepdims=True)
    deviations_TU = 0.4 * relative_TU + 0.1 * rng.standard_normal(sizes_TU.shape)
    slopes = [
        float(np.mean((deviations_TU - left_TU)[relative_TU != 0] / relative_TU[relative_TU != 0]))
        for left_TU in without_size(deviations_TU, sizes_TU, 0)
    ]
    middle, low, high = slopes
    assert low < 0.4 < high
    assert middle - low == pytest.approx(2 * 0.1 / np.sqrt(1400), rel=0.25)

"""What follows from sizes is learnt and taken away."""

import numpy as np
import pytest

from rankscope.diagnose.outlier_parts import SizeEffect

UNITS = 8
BOTH = np.array([True, False])  # the first signal follows a power, the second the logarithm


def step(rng, sizes_U, slopes=(0.6, -0.2), noise=0.0):
    """Return values that follow sizes."""
    scatter = noise * rng.standard_normal((2, len(sizes_U)))
    return np.array([
        3.0 * np.exp(slopes[0] * sizes_U + scatter[0]), 0.4 + slopes[1] * sizes_U + scatter[1]
    ])  # fmt: skip


def taught(rng, steps=100, noise=0.05):
    effect = SizeEffect(BOTH, UNITS)
    for _ in range(steps):
        sizes_U = 5 + 0.3 * rng.standard_normal(UNITS)
        effect.take_away(step(rng, sizes_U, noise=noise), np.arange(2), sizes_U)
    return effect


def test_what_follows_sizes_is_taken_away():
    rng = np.random.default_rng(0)
    effect = taught(rng)
    sizes_U = 5 + 0.3 * np.arange(UNITS)
    left = effect.take_away(step(rng, sizes_U), np.arange(2), sizes_U)
    middle = np.median(sizes_U)
    np.testing.assert_allclose(left[0], 3.0 * np.exp(0.6 * middle), rtol=0.05)
    np.testing.assert_allclose(left[1], 0.4 - 0.2 * middle, atol=0.05)


def test_a_step_is_freed_from_what_earlier_steps_taught_alone():
    rng = np.random.default_rng(1)
    sizes_U = rng.standard_normal(UNITS)
    values = step(rng, sizes_U)
    effect = SizeEffect(BOTH, UNITS)
    np.testing.assert_array_equal(effect.take_away(values, np.arange(2), sizes_U), values)
    assert np.ptp(effect.take_away(values, np.arange(2), sizes_U)[0]) < 0.2 * np.ptp(values[0])


def test_the_units_stay_exchangeable():
    """To permute values and sizes of a step together permutes what is left."""
    rng = np.random.default_rng(2)
    sizes_U, order = rng.standard_normal(UNITS), rng.permutation(UNITS)
    values = step(rng, sizes_U, noise=0.3)
    left = taught(np.random.default_rng(3)).take_away(values, np.arange(2), sizes_U)
    permuted = taught(np.random.default_rng(3)).take_away(
        values[:, order], np.arange(2), sizes_U[order]
    )
    np.testing.assert_array_equal(permuted, left[:, order])


def test_one_unit_alone_teaches_nothing():
    rng = np.random.default_rng(4)
    effect = SizeEffect(BOTH, UNITS)
    sizes_U = np.zeros(UNITS)
    sizes_U[3] = np.log(2)
    for _ in range(200):
        values = step(rng, np.zeros(UNITS), noise=0.05)
        values[0, 3] *= 3
        left = effect.take_away(values, np.arange(2), sizes_U)
        np.testing.assert_array_equal(left, values)


def test_of_two_units_nothing_is_taken_away():
    rng = np.random.default_rng(4)
    effect = SizeEffect(BOTH, 2)
    for _ in range(20):
        sizes_U, values = np.array([0.0, 0.5]), np.array([[1.0, 1.5], [0.3, 0.2]]) + rng.random()
        assert effect.take_away(values, np.arange(2), sizes_U) is values


def test_values_that_explode_are_told_by_no_warning():
    effect = SizeEffect(BOTH, UNITS)
    sizes_U = 0.1 * np.arange(UNITS)
    for _ in range(20):
        effect.take_away(np.exp(np.array([300 * sizes_U, sizes_U])), np.arange(2), sizes_U)
    left = effect.take_away(np.ones((2, UNITS)), np.arange(2), 100 * sizes_U)
    assert np.isinf(left[0, 0])


def test_a_fault_stays_whole():
    rng = np.random.default_rng(5)
    effect = SizeEffect(BOTH, UNITS)
    for _ in range(100):
        sizes_U = 5 + 0.3 * rng.standard_normal(UNITS)
        sizes_U[6] += 0.4  # the faulty one has larger batches, too
        values = step(rng, sizes_U, noise=0.05)
        values[0, 6] *= 1.5
        left = effect.take_away(values, np.arange(2), sizes_U)
    assert left[0, 6] / np.median(left[0]) == pytest.approx(1.5, rel=0.15)


@pytest.mark.parametrize("sizes", [np.full(UNITS, 3.0), np.full(UNITS, np.nan)])
def test_sizes_that_do_not_differ_or_are_unknown_change_nothing(sizes):
    rng = np.random.default_rng(6)
    effect, values = taught(rng), rng.random((2, UNITS))
    before = effect.state()
    assert effect.take_away(values, np.arange(2), sizes) is values
    one_unknown = np.arange(float(UNITS))
    one_unknown[2] = np.nan
    assert effect.take_away(values, np.arange(2), one_unknown) is values
    assert all(np.array_equal(before[name], value) for name, value in effect.state().items())


def test_values_that_are_missing_or_no_logarithm_do_no_harm():
    rng = np.random.default_rng(7)
    effect = taught(rng)
    for _ in range(50):
        sizes_U = 5 + 0.3 * rng.standard_normal(UNITS)
        values = step(rng, sizes_U)
        values[0, :3] = [0.0, -1.0, np.inf]
        values[:, 3] = np.nan
        sizes_U[3] = np.nan  # who is not compared needs no size
        left = effect.take_away(values, np.arange(2), sizes_U)
        assert np.isnan(left[:, 3]).all()
        assert left[0, 0] == 0
        assert left[0, 2] == np.inf
    assert left[0, 4:] == pytest.approx(np.median(left[0, 4:]), rel=0.05)


def test_signals_that_are_measured_less_often_learn_from_their_own_steps():
    rng = np.random.default_rng(8)
    effect = SizeEffect(BOTH, UNITS)
    for number in range(200):
        sizes_U = 5 + 0.3 * rng.standard_normal(UNITS)
        rows = np.arange(1 if number % 4 else 2)
        effect.take_away(step(rng, sizes_U, noise=0.05)[rows], rows, sizes_U)
    left = effect.take_away(step(rng, sizes_U)[1:], np.array([1]), sizes_U)
    assert np.ptp(left) < 0.1 * np.ptp(step(rng, sizes_U)[1])


def test_what_it_learnt_survives_a_restart():
    rng = np.random.default_rng(9)
    before, after = taught(rng), SizeEffect(BOTH, UNITS)
    after.restore(before.state())
    sizes_U = rng.standard_normal(UNITS)
    values = step(rng, sizes_U, noise=0.3)
    np.testing.assert_array_equal(
        after.take_away(values, np.arange(2), sizes_U),
        before.take_away(values, np.arange(2), sizes_U),
    )

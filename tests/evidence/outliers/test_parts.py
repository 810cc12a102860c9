"""What follows from sizes is learnt and taken away."""

import numpy as np
import pytest

from rankscope.evidence.outliers.parts import SizeEffect

UNITS = 8
BOTH = np.array([True, False])  # the first signal follows a power, the second the logarithm


def step(rng, sizes_U, slopes=(0.6, -0.2), noise=0.0):
    """Return values that follow sizes."""
    scatter = noise * rng.standard_normal((2, len(sizes_U)))
    return np.array([
        3.0 * np.exp(slopes[0] * sizes_U + scatter[0]), 0.4 + slopes[1] * sizes_U + scatter[1]
    ])  # fmt: skip


def free(effect, values, sizes_U):
    """Return the values of one step freed from sizes."""
    [left] = effect.adjust(values[None], sizes_U[None])
    return left


def taught(rng, steps=100, noise=0.05):
    effect = SizeEffect(BOTH, UNITS)
    for _ in range(steps):
        sizes_U = 5 + 0.3 * rng.standard_normal(UNITS)
        free(effect, step(rng, sizes_U, noise=noise), sizes_U)
    return effect


def test_what_follows_sizes_is_taken_away():
    rng = np.random.default_rng(0)
    effect = taught(rng)
    sizes_U = 5 + 0.3 * np.arange(UNITS)
    left = free(effect, step(rng, sizes_U), sizes_U)
    middle = np.median(sizes_U)
    np.testing.assert_allclose(left[0], 3.0 * np.exp(0.6 * middle), rtol=0.05)
    np.testing.assert_allclose(left[1], 0.4 - 0.2 * middle, atol=0.05)


def test_a_step_is_freed_from_what_earlier_steps_taught_alone():
    rng = np.random.default_rng(1)
    sizes_U = rng.standard_normal(UNITS)
    values = step(rng, sizes_U)
    effect = SizeEffect(BOTH, UNITS)
    np.testing.assert_array_equal(free(effect, values, sizes_U), values)
    assert np.ptp(free(effect, values, sizes_U)[0]) < 0.2 * np.ptp(values[0])


def test_the_units_stay_exchangeable():
    """To permute values and sizes of a step together permutes what is left."""
    rng = np.random.default_rng(2)
    sizes_U, order = rng.standard_normal(UNITS), rng.permutation(UNITS)
    values = step(rng, sizes_U, noise=0.3)
    left = free(taught(np.random.default_rng(3)), values, sizes_U)
    permuted = free(taught(np.random.default_rng(3)), values[:, order], sizes_U[order])
    np.testing.assert_array_equal(permuted, left[:, order])


def test_one_unit_alone_teaches_nothing():
    rng = np.random.default_rng(4)
    effect = SizeEffect(BOTH, UNITS)
    sizes_U = np.zeros(UNITS)
    sizes_U[3] = np.log(2)
    for _ in range(200):
        values = step(rng, np.zeros(UNITS), noise=0.05)
        values[0, 3] *= 3
        left = free(effect, values, sizes_U)
        np.testing.assert_array_equal(left, values)


def test_of_two_units_nothing_is_taken_away():
    rng = np.random.default_rng(4)
    effect = SizeEffect(BOTH, 2)
    for _ in range(20):
        sizes_U, values = np.array([0.0, 0.5]), np.array([[1.0, 1.5], [0.3, 0.2]]) + rng.random()
        assert free(effect, values, sizes_U).tolist() == values.tolist()


def test_values_that_explode_are_told_by_no_warning():
    effect = SizeEffect(BOTH, UNITS)
    sizes_U = 0.1 * np.arange(UNITS)
    for _ in range(20):
        free(effect, np.exp(np.array([300 * sizes_U, sizes_U])), sizes_U)
    left = free(effect, np.ones((2, UNITS)), 100 * sizes_U)
    assert np.isinf(left[0, 0])


def test_a_fault_stays_whole():
    rng = np.random.default_rng(5)
    effect = SizeEffect(BOTH, UNITS)
    for _ in range(100):
        sizes_U = 5 + 0.3 * rng.standard_normal(UNITS)
        sizes_U[6] += 0.4  # the faulty one has larger batches, too
        values = step(rng, sizes_U, noise=0.05)
        values[0, 6] *= 1.5
        left = free(effect, values, sizes_U)
    assert left[0, 6] / np.median(left[0]) == pytest.approx(1.5, rel=0.15)


@pytest.mark.parametrize("sizes", [np.full(UNITS, 3.0), np.full(UNITS, np.nan)])
def test_sizes_that_do_not_differ_or_are_unknown_change_nothing(sizes):
    rng = np.random.default_rng(6)
    effect, values = taught(rng), rng.random((2, UNITS))
    before = effect.state()
    assert free(effect, values, sizes).tolist() == values.tolist()
    one_unknown = np.arange(float(UNITS))
    one_unknown[2] = np.nan
    assert free(effect, values, one_unknown).tolist() == values.tolist()
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
        left = free(effect, values, sizes_U)
        assert np.isnan(left[:, 3]).all()
        assert left[0, 0] == 0
        assert left[0, 2] == np.inf
    assert left[0, 4:] == pytest.approx(np.median(left[0, 4:]), rel=0.05)


def test_signals_that_are_measured_less_often_learn_from_their_own_steps():
    rng = np.random.default_rng(8)
    effect = SizeEffect(BOTH, UNITS)
    for number in range(200):
        sizes_U = 5 + 0.3 * rng.standard_normal(UNITS)
        values = step(rng, sizes_U, noise=0.05)
        if number % 4:
            values[1] = np.nan
        free(effect, values, sizes_U)
    values = step(rng, sizes_U)
    values[0] = np.nan
    left = free(effect, values, sizes_U)
    assert np.isnan(left[0]).all()
    assert np.ptp(left[1]) < 0.1 * np.ptp(values[1])


@pytest.mark.parametrize("together", [2, 7, 40])
def test_how_many_steps_are_taken_together_makes_no_difference(together):
    rng = np.random.default_rng(10)
    sizes_TU = 5 + 0.3 * rng.standard_normal((40, UNITS))
    sizes_TU[7] = 5.0
    sizes_TU[9, 2] = np.nan
    values_TSU = np.array([step(rng, sizes_U, noise=0.1) for sizes_U in sizes_TU])
    values_TSU[rng.random(values_TSU.shape) < 0.1] = np.nan
    values_TSU[11, 0], values_TSU[12] = np.nan, np.nan
    one, many = SizeEffect(BOTH, UNITS), SizeEffect(BOTH, UNITS)
    expected = [free(one, *each) for each in zip(values_TSU, sizes_TU, strict=True)]
    pieces = [slice(start, start + together) for start in range(0, 40, together)]
    found = [many.adjust(values_TSU[piece], sizes_TU[piece]) for piece in pieces]
    np.testing.assert_array_equal(np.concatenate(found), expected)
    for name, value in one.state().items():
        np.testing.assert_array_equal(many.state()[name], value)


def test_what_it_learnt_survives_a_restart():
    rng = np.random.default_rng(9)
    before, after = taught(rng), SizeEffect(BOTH, UNITS)
    after.restore(before.state())
    sizes_U = rng.standard_normal(UNITS)
    values = step(rng, sizes_U, noise=0.3)
    np.testing.assert_array_equal(
        free(after, values, sizes_U),
        free(before, values, sizes_U),
    )

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


def test_the_units_stay_exchangeable():
    """To permute values and sizes of a step together permutes what is left."""
    rng = np.random.default_rng(2)
    sizes_U, order = rng.standard_normal(UNITS), rng.permutation(UNITS)
    values = step(rng, sizes_U, noise=0.3)
    left = free(taught(np.random.default_rng(3)), values, sizes_U)
    permuted = free(taught(np.random.default_rng(3)), values[:, order], sizes_U[order])
    np.testing.assert_array_equal(permuted, left[:, order])


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

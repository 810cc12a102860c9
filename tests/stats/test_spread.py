import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.stats import spread


def exact(values):
    finite = [Fraction(value) for value in values if math.isfinite(value)]
    if not finite:
        return None
    mean = sum(finite) / len(finite)
    return mean, sum((x - mean) ** 2 for x in finite) / len(finite), max(finite) - min(finite)


@given(st.lists(st.floats(width=64), max_size=9))
def test_mean_spread_and_range_agree_with_fractions(values):
    expected = exact(values)
    found = [
        f(np.array(values)) for f in (spread.finite_mean, spread.population_std, spread.value_range)
    ]
    if expected is None:
        assert all(math.isnan(value) for value in found)
        return
    largest = max(abs(Fraction(v)) for v in values if math.isfinite(v))
    tolerance = largest * Fraction(1, 10**14) + Fraction(1, 10**322)
    assert abs(Fraction(found[0]) - expected[0]) <= tolerance
    root = Fraction(found[1])
    assert (root - tolerance if root > tolerance else 0) ** 2 <= expected[1]
    assert expected[1] <= (root + tolerance) ** 2
    if math.isinf(found[2]):
        assert expected[2] > Fraction(np.finfo(np.float64).max)
    else:
        assert abs(Fraction(found[2]) - expected[2]) <= tolerance


def units_of(values_W, weights_W=None):
    values, weights = (
        None if each is None else [np.asarray(own, float) for own in each]
        for each in (values_W, weights_W)
    )
    units = spread.pool_units(values, weights)
    assert units is not None
    return units


def weighted(rng):
    tokens = rng.lognormal(4, 1.0, (8, 2)).round()
    return rng.standard_normal((8, 2)) / np.sqrt(tokens) + 1 / tokens, tokens


@pytest.mark.parametrize(
    ("stream", "same_index"),
    [
        (lambda rng: [rng.standard_normal((8, 4))], False),
        (lambda rng: [rng.integers(0, 2, (6, 3))], False),  # ties
        (weighted, True),
        (lambda rng: [[rng.exponential(1, n) for n in (4, 1, 3, 2)]], False),
        (lambda rng: [rng.standard_normal((40, 4))], False),
    ],
)
def test_e_values_of_healthy_streams_have_expectation_one(stream, same_index):
    data, draws = np.random.default_rng(5), np.random.default_rng(6)
    drawn = (units_of(*stream(data)) for _ in range(1500))
    ranks = (spread.spread_ranks(units, draws, same_index=same_index) for units in drawn)
    e = np.array([np.concatenate(spread.rank_bets(each)) for each in ranks])
    error = e.std(axis=0) / math.sqrt(len(e))
    assert (error < 0.1).all()
    assert (np.abs(e.mean(axis=0) - 1) < 4 * error + 1e-12).all()


def test_over_all_arrangements_the_mean_is_one_to_rounding():
    """Whatever the circle: the arrangements that it turns into each other share one mean."""
    values, weights = [0.0, 0.0, 1.0, 2.5, 9.0, -4.0], [1.0, 7.0, 1.0, 2.0, 2.0, 3.0]
    starts, index = np.array([0, 2, 4]), np.array([0, 1, 0, 1, 0, 1])
    orders = [list(order) for order in itertools.permutations(range(6))]
    for seed in range(3):
        e = []
        for order in orders:
            units = spread.Units(np.array(values)[order], np.array(weights)[order], index, starts)
            ranks = spread.spread_ranks(units, np.random.default_rng(seed), same_index=False)
            e.append(spread.rank_bets(ranks))
        e = np.array(e)
        assert e.std() > 0.1
        np.testing.assert_allclose(e.mean(axis=0), 1.0, rtol=1e-12)


@pytest.mark.parametrize("values", [np.full((4, 3), 1e300), [[0.1 + 0.2, 0.3], [0.3, 0.1 + 0.2]]])
def test_values_that_are_equal_to_rounding_are_ties(values):
    ranks = spread.spread_ranks(units_of(values), np.random.default_rng(0), same_index=False)
    np.testing.assert_array_equal(ranks, 0.5)

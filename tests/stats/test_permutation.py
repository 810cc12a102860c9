"""Exact e-values from micro-batches: expectation 1 under the null, and power against faults."""

import itertools
import math

import numpy as np
import pytest

from rankscope.stats.budget import ShiryaevRoberts
from rankscope.stats.spread import (
    STRENGTHS,
    Units,
    pool_units,
    rank_bets,
    spread_ranks,
)

NAN = float("nan")


def units_of(values_WM, weights_WM=None):
    weights = None if weights_WM is None else list(np.asarray(weights_WM, float))
    units = pool_units(list(np.asarray(values_WM, float)), weights)
    assert units is not None
    return units


def bets(units, seed=0, *, same_index):
    return rank_bets(spread_ranks(units, np.random.default_rng(seed), same_index=same_index))


def normal(rng, t):
    return units_of(rng.standard_normal((8, 4)))


def heavy_tailed(rng, t):
    return units_of(rng.standard_t(1.2, (4, 3)))


def tied(rng, t):
    return units_of(rng.integers(0, 2, (6, 3)))


def weighted(rng, t):
    tokens = rng.lognormal(4, 1.0, (8, 2)).round()
    return units_of(rng.standard_normal((8, 2)) / np.sqrt(tokens) + 1 / tokens, tokens)


def drifting(rng, t):
    return units_of(1e3 * math.sin(t) + (1 + t % 50) * rng.gamma(0.5, 1.0, (8, 4)))


def ragged(rng, t):
    lengths = (4, 1, 3, 2)
    units = pool_units([rng.exponential(1, n) for n in lengths])
    assert units is not None
    return units


def many(rng, t):
    return units_of(rng.standard_normal((40, 4)))


STREAMS = [normal, heavy_tailed, tied, weighted, drifting, ragged, many]


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.__name__)
@pytest.mark.parametrize("same_index", [False, True], ids=["all units", "same index"])
def test_e_values_of_healthy_streams_have_expectation_one(stream, same_index):
    data, draws = np.random.default_rng(5), np.random.default_rng(6)
    e = np.array(
        [
            np.concatenate(rank_bets(spread_ranks(stream(data, t), draws, same_index=same_index)))
            for t in range(1500)
        ]
    )
    error = e.std(axis=0) / math.sqrt(len(e))
    assert (error < 0.1).all()
    assert (np.abs(e.mean(axis=0) - 1) < 4 * error + 1e-12).all()


def test_over_all_arrangements_the_mean_is_one_to_rounding():
    """Whatever the circle: the arrangements that it turns into each other share one mean."""
    values, weights = [0.0, 0.0, 1.0, 2.5, 9.0, -4.0], [1.0, 7.0, 1.0, 2.0, 2.0, 3.0]
    starts, index = np.array([0, 2, 4]), np.array([0, 1, 0, 1, 0, 1])
    orders = [list(order) for order in itertools.permutations(range(6))]
    for seed in range(3):
        e = np.array(
            [
                bets(
                    Units(np.array(values)[order], np.array(weights)[order], index, starts),
                    seed,
                    same_index=False,
                )
                for order in orders
            ]
        )
        assert e.std() > 0.1
        np.testing.assert_allclose(e.mean(axis=0), 1.0, rtol=1e-12)


def test_evidence_reaches_a_level_no_more_often_than_promised():
    level, num_steps, num_runs = 300.0, 40, 150
    reached = 0
    for run in range(num_runs):
        rng = np.random.default_rng(run)
        detector = ShiryaevRoberts(2, len(STRENGTHS))
        for t in range(num_steps):
            e = rank_bets(spread_ranks(normal(rng, t), rng, same_index=False))
            detector.observe(np.array(e, np.float32))
            if detector.evidence.mean() >= level:
                reached += 1
                break
    promised = num_steps / level
    assert reached / num_runs < promised + 3 * math.sqrt(promised / num_runs)


def test_the_same_data_on_all_workers_is_the_lowest_spread():
    values = np.tile([3.1, 2.2, 2.9, 3.6], (8, 1))
    ranks = spread_ranks(units_of(values), np.random.default_rng(0), same_index=False)
    assert ranks[0] == ranks.min() == 0.5 / len(ranks)
    low, high = rank_bets(ranks)
    assert low[1] > 5
    assert (high < 1).all()


def test_within_an_index_the_same_data_show_nothing():
    values = np.tile([3.1, 2.2, 2.9, 3.6], (8, 1))
    for e in bets(units_of(values), same_index=True):
        np.testing.assert_allclose(e, 1.0)


@pytest.mark.parametrize("lengths", [(4,) * 8, (4, 1, 3, 2, 4, 2, 3, 4)])
def test_a_kind_of_data_per_worker_is_the_highest_spread_under_both_nulls(lengths):
    rng = np.random.default_rng(0)
    values = [10.0 * rank + rng.standard_normal(length) for rank, length in enumerate(lengths)]
    for same_index in (False, True):
        low, high = bets(pool_units(values), same_index=same_index)
        assert high[1] > 5
        assert (low < 1).all()


def test_an_index_that_means_something_breaks_only_the_null_of_all_units():
    rng = np.random.default_rng(1)
    e_all, e_same = [], []
    for t in range(300):
        units = units_of(3.0 * np.arange(4) + rng.standard_normal((8, 4)))
        e_all.append(bets(units, t, same_index=False)[0][1])
        e_same.append(bets(units, t, same_index=True)[0][1])
    assert np.mean(e_all) > 3
    assert abs(np.mean(e_same) - 1) < 4 * np.std(e_same) / math.sqrt(300)


@pytest.mark.parametrize("same_index", [False, True])
def test_shift_and_scale_of_all_values_change_nothing(same_index):
    values = np.random.default_rng(2).standard_normal((5, 3))
    expected = bets(units_of(values), same_index=same_index)
    found = bets(units_of(1e6 * values - 3e7), same_index=same_index)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "values",
    [
        np.full((4, 3), 0.1),
        np.full((4, 3), 1e300),
        np.array([[0.1 + 0.2, 0.3], [0.3, 0.1 + 0.2]]),
        np.repeat([[0.1 + 0.2], [0.3]], 4000, axis=1),
        np.zeros((2, 2)),
    ],
)
def test_values_that_are_equal_to_rounding_are_ties(values):
    ranks = spread_ranks(units_of(values), np.random.default_rng(0), same_index=False)
    np.testing.assert_array_equal(ranks, 0.5)


def test_units_without_weight_and_unknown_weights():
    values = [np.array([1.0, NAN, 2.0]), np.array([4.0, 5.0])]
    units = pool_units(values, [np.array([10.0, 0.0, 30.0]), np.array([1.0, 2.0])])
    assert units is not None
    np.testing.assert_array_equal(units.values_U, [1, 2, 4, 5])
    np.testing.assert_array_equal(units.weights_U, [10, 30, 1, 2])
    np.testing.assert_array_equal(units.index_U, [0, 2, 0, 1])
    np.testing.assert_array_equal(units.starts_W, [0, 2])
    for weight in (NAN, math.inf):
        unknown = pool_units([np.ones(2), np.ones(2)], [np.array([5.0, weight]), np.ones(2)])
        assert unknown is not None
        np.testing.assert_array_equal(unknown.weights_U, np.ones(4))


@pytest.mark.parametrize(
    "values",
    [
        [],
        [np.array([1.0]), np.array([2.0])],
        [np.array([1.0, 2.0]), np.empty(0)],
        [np.array([1.0, NAN]), np.array([2.0, 3.0])],
    ],
)
def test_units_that_cannot_be_compared(values):
    assert pool_units(values) is None


def test_the_first_units_can_be_left_out():
    values = [np.array([9.0, 1.0, 2.0]), np.array([9.0, 3.0]), np.array([9.0])]
    units = pool_units(values, from_index=1)
    assert units is not None
    np.testing.assert_array_equal(units.values_U, [1, 2, 3])
    np.testing.assert_array_equal(units.starts_W, [0, 2])
    assert pool_units([np.ones(2), np.ones(2)], from_index=1) is None

"""The consensus against all pairs of the same sketches, and what narrowing may change."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.stats.consensus import (
    Halves,
    consensus_of,
    fold,
    in_turn,
    narrow,
    narrowing_for,
    step_values,
)
from rankscope.stats.direction import (
    cosines_from_gram,
    gram,
    has_direction,
    leave_one_out,
    mean_and_min_cosine,
    norm_weighted_cosine,
)

BY_HALVES = 1e-4


def workers(num_workers, seed=0, width=127, num_groups=2, common=0.3):
    """Return sketches ``[W, K]`` with something in common, and group sketches ``[g, W, 31]``."""
    rng = np.random.default_rng(seed)
    sketches = rng.normal(size=(num_workers, width)) + common * rng.normal(size=width)
    groups = rng.normal(size=(num_groups, num_workers, 31)) + rng.normal(size=31)
    lengths = rng.lognormal(size=(num_workers, 1))
    return (sketches * lengths).astype(np.float32), groups.astype(np.float32)


def through_halves(rows):
    """Return rows as they arrive at the root when they are not folded."""
    return narrow(rows, rows.shape[-1]).widened()


def check_against_pairs(sketches, groups, tolerance, given=None):
    """Compare with all pairs of ``sketches``; the consensus is of ``given``, if that differs."""
    consensus = consensus_of(*((sketches, groups) if given is None else given))
    gram_WW = gram(sketches)
    close = {"rtol": 0, "atol": tolerance, "equal_nan": True}
    np.testing.assert_allclose(consensus.cosine_rest_W, leave_one_out(gram_WW), **close)
    for g, rows in enumerate(groups):
        exact_W = leave_one_out(gram(rows))
        np.testing.assert_allclose(consensus.group_cosine_rest_Wg[:, g], exact_W, **close)
    values = step_values(consensus)
    exact_mean = mean_and_min_cosine(cosines_from_gram(gram_WW))[0]
    assert values["cosine_mean"] == pytest.approx(exact_mean, abs=tolerance, nan_ok=True)
    exact_weighted = norm_weighted_cosine(gram_WW)
    assert values["cosine_weighted"] == pytest.approx(exact_weighted, abs=tolerance, nan_ok=True)
    assert values["directions_undefined"] == (~has_direction(gram_WW)).sum()
    assert np.isnan(values["cosine_min"])


@pytest.mark.parametrize("num_workers", [3, 10, 65, 100])
@pytest.mark.parametrize("common", [0.0, 0.3, 10.0])
def test_it_finds_what_all_pairs_give(num_workers, common):
    sketches, groups = workers(num_workers, seed=num_workers, common=common)
    check_against_pairs(sketches, groups, 1e-11)
    halves = through_halves(sketches), np.stack([through_halves(rows) for rows in groups])
    check_against_pairs(sketches, groups, BY_HALVES, halves)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_worker_that_is_not_finite_leaves_the_others_as_they_are_without_it(bad):
    sketches, groups = workers(9)
    sketches[4, 7] = groups[1, 4, 3] = bad
    found = consensus_of(through_halves(sketches), np.stack([through_halves(r) for r in groups]))
    others = np.arange(9) != 4
    expected = consensus_of(
        through_halves(sketches[others]), np.stack([through_halves(r[others]) for r in groups])
    )
    np.testing.assert_array_equal(found.cosine_rest_W[others], expected.cosine_rest_W)
    assert found.cosine_mean == pytest.approx(expected.cosine_mean, abs=1e-12)
    assert found.cosine_weighted == pytest.approx(expected.cosine_weighted, abs=1e-12)
    assert found.num_directions == 8
    assert np.isnan(found.cosine_rest_W[4])
    assert np.isnan(found.group_cosine_rest_Wg[4, 1])
    assert not np.isnan(found.group_cosine_rest_Wg[4, 0])


@pytest.mark.parametrize("num_workers", [3, 10, 100])
@pytest.mark.parametrize("factor", [1e6, 1e30])
def test_one_huge_worker_hides_the_rest_from_nobody_but_itself(num_workers, factor):
    sketches, groups = workers(num_workers)
    sketches[1] *= np.float32(factor / np.linalg.norm(sketches[1]))
    found = consensus_of(sketches, groups)
    exact_W = leave_one_out(gram(sketches))
    others = np.arange(num_workers) != 1
    np.testing.assert_allclose(found.cosine_rest_W[others], exact_W[others], atol=1e-9)
    if factor == 1e6:
        assert found.cosine_rest_W[1] == pytest.approx(exact_W[1], abs=1e-6)
    exact_mean = mean_and_min_cosine(cosines_from_gram(gram(sketches)))[0]
    assert found.cosine_mean == pytest.approx(exact_mean, abs=1e-9)


def test_identical_workers_have_cosine_one_exactly():
    [sketch], groups = workers(1)
    for num_workers in (2, 3, 100):
        rows = through_halves(np.stack([sketch] * num_workers))
        found = consensus_of(rows, np.stack([np.repeat(g, num_workers, axis=0) for g in groups]))
        assert set(found.cosine_rest_W) == {1.0}
        assert set(found.group_cosine_rest_Wg.ravel()) == {1.0}
        assert found.cosine_mean == found.cosine_weighted == 1.0


def test_opposite_workers_have_cosine_minus_one():
    [sketch], _ = workers(1)
    rows = through_halves(np.stack([sketch, -2 * sketch]))
    found = consensus_of(rows, np.empty((0, 2, 0)))
    assert found.cosine_rest_W.tolist() == [-1.0, -1.0]
    assert found.cosine_mean == found.cosine_weighted == -1.0
    assert found.group_cosine_rest_Wg.shape == (2, 0)


def test_zero_gradients_have_no_direction():
    sketches, groups = workers(5)
    sketches[[0, 2]] = 0
    check_against_pairs(sketches, groups, 1e-11)


@pytest.mark.parametrize("num_workers", [1, 4])
def test_without_two_directions_nothing_is_defined(num_workers):
    sketches, groups = workers(num_workers)
    sketches[1:] = 0
    values = step_values(consensus_of(sketches, groups))
    assert np.isnan(values["cosine_mean"])
    assert np.isnan(values["cosine_weighted"])
    assert np.isnan(consensus_of(sketches, groups).cosine_rest_W).all()
    assert values["directions_undefined"] == num_workers - 1


def test_others_that_cancel_have_no_direction():
    [sketch], _ = workers(1)
    other = np.roll(sketch, 1)
    rows = through_halves(np.stack([sketch, other, -other * np.float32(1.0001)]))
    assert np.isnan(consensus_of(rows, np.empty((0, 3, 0))).cosine_rest_W[0])


@given(st.permutations(range(7)))
def test_the_order_of_workers_does_not_matter(order):
    sketches, groups = workers(7)
    found = consensus_of(sketches, groups)
    moved = consensus_of(sketches[order], groups[:, order])
    np.testing.assert_allclose(moved.cosine_rest_W, found.cosine_rest_W[order], atol=1e-12)
    assert step_values(moved) == pytest.approx(step_values(found), abs=1e-12, nan_ok=True)


def test_narrow_sketches_err_as_the_docs_say():
    rng = np.random.default_rng(1)
    num_workers, size, wide = 65, 20_000, 4093
    signs, buckets = rng.choice([-1.0, 1.0], size), np.arange(size) % wide
    squares = {width: [] for width in (61, 251, 1021)}
    mean_squares = {width: [] for width in squares}
    for _ in range(6):
        rows = rng.normal(size=(num_workers, size)) + 0.2 * rng.normal(size=size)
        signs = rng.choice([-1.0, 1.0], size)
        exact = gram(rows)
        exact_W, exact_mean = leave_one_out(exact), mean_and_min_cosine(cosines_from_gram(exact))[0]
        sketches = np.stack([np.bincount(buckets, row * signs, wide) for row in rows])
        for width in squares:
            narrowed = narrow(sketches.astype(np.float32), width).widened()
            consensus = consensus_of(narrowed, np.empty((0, num_workers, 0)))
            squares[width] += ((consensus.cosine_rest_W - exact_W) ** 2).tolist()
            mean_squares[width].append((consensus.cosine_mean - exact_mean) ** 2)
    for width, found in squares.items():
        promised = (1 - np.mean(exact_W) ** 2) * np.sqrt(1 / width + 1 / wide)
        assert 0.8 * promised < np.sqrt(np.mean(found)) < 1.25 * promised
        promised = np.sqrt(2 / width) * (exact_mean + 1 / num_workers) * (1 - exact_mean)
        assert np.sqrt(np.mean(mean_squares[width])) < 2 * promised


def test_halves_keep_any_magnitude_and_lose_less_than_they_say():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(5, 300)) * np.array([[1e-40], [1e-20], [1.0], [1e20], [3e37]])
    rows = rows.astype(np.float32)
    halves = narrow(rows, 300)
    assert isinstance(halves, Halves)
    error_N = np.linalg.norm(halves.widened() - rows, axis=1) / np.linalg.norm(
        rows.astype(np.float64), axis=1
    )
    assert (error_N < 3.5e-4).all()
    assert (narrow(np.zeros((2, 9), np.float32), 5).widened() == 0).all()


def test_a_row_that_is_not_finite_spoils_no_other():
    rows = np.ones((3, 10), np.float32)
    rows[1, 3] = np.inf
    found = narrow(rows, 7).widened()
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[[0, 2]]).all()


def test_folding_is_linear_and_leaves_narrow_rows_alone():
    rng = np.random.default_rng(0)
    rows = rng.integers(-9, 9, size=(2, 1021)).astype(np.float32)
    np.testing.assert_array_equal(fold(rows, 251).sum(axis=0), fold(rows.sum(0)[None], 251)[0])
    assert fold(rows, 1021) is rows
    signs = fold(np.eye(1021, dtype=np.float32), 251).sum(axis=1)
    assert set(signs) == {-1.0, 1.0}
    assert abs(signs.sum()) < 100


@pytest.mark.parametrize("count", [1, 4, 5, 40, 41, 1000])
@pytest.mark.parametrize("interval", [1, 2, 10, 13, 89, 100, 144])
def test_every_group_has_its_turn_about_equally_often(count, interval):
    num_steps = max(20 * count, 400)
    turns = [in_turn(interval * turn, count, 4) for turn in range(num_steps)]
    together = min(4, count)
    assert all(len(set(turn.tolist())) == together for turn in turns)
    often = np.bincount(np.concatenate(turns), minlength=count) / (num_steps * together / count)
    assert (often > 0.4).all()
    assert (often < 1.8).all()


def test_without_groups_nobody_has_a_turn():
    assert in_turn(3, 0, 4).tolist() == []


def test_more_workers_bring_less_each():
    narrowings = [narrowing_for(count) for count in (65, 1024, 10_240)]
    assert narrowings == sorted(narrowings, reverse=True)

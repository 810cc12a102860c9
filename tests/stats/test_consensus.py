"""The consensus against all pairs of the same sketches, and what narrowing may change."""

import numpy as np
import pytest

from rankscope.stats.direction import (
    consensus_of,
    cosines_from_gram,
    fold,
    gram,
    has_direction,
    leave_one_out,
    mean_and_min_cosine,
    narrow,
    norm_weighted_cosine,
    step_values,
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


@pytest.mark.parametrize(("num_workers", "common"), [(3, 0.3), (10, 10.0), (65, 0.0)])
def test_it_finds_what_all_pairs_give(num_workers, common):
    sketches, groups = workers(num_workers, seed=num_workers, common=common)
    check_against_pairs(sketches, groups, 1e-11)
    halves = through_halves(sketches), np.stack([through_halves(rows) for rows in groups])
    check_against_pairs(sketches, groups, BY_HALVES, halves)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
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


def test_identical_workers_have_cosine_one_exactly():
    [sketch], groups = workers(1)
    for num_workers in (2, 3, 100):
        rows = through_halves(np.stack([sketch] * num_workers))
        found = consensus_of(rows, np.stack([np.repeat(g, num_workers, axis=0) for g in groups]))
        assert set(found.cosine_rest_W) == {1.0}
        assert set(found.group_cosine_rest_Wg.ravel()) == {1.0}
        assert found.cosine_mean == found.cosine_weighted == 1.0


def test_folding_is_linear_and_leaves_narrow_rows_alone():
    rng = np.random.default_rng(0)
    rows = rng.integers(-9, 9, size=(2, 1021)).astype(np.float32)
    np.testing.assert_array_equal(fold(rows, 251).sum(axis=0), fold(rows.sum(0)[None], 251)[0])
    assert fold(rows, 1021) is rows
    signs = fold(np.eye(1021, dtype=np.float32), 251).sum(axis=1)
    assert set(signs) == {-1.0, 1.0}
    assert abs(signs.sum()) < 100

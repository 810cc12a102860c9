import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rankscope.stats import direction

NAN = float("nan")


def gradients(min_workers=1, max_workers=6):
    numbers = st.integers(-50, 50).map(lambda n: n / 8)
    shapes = st.tuples(st.integers(min_workers, max_workers), st.integers(1, 7))
    return shapes.flatmap(lambda shape: arrays(np.float64, shape, elements=numbers))


def naive_cosine(a, b):
    length = math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(x * x for x in b))
    if length == 0 or not math.isfinite(length):
        return NAN
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / length


def naive_pairs(rows):
    return [naive_cosine(*pair) for pair in combinations(rows, 2)]


def naive_weighted(rows):
    above = below = 0.0
    for i, a in enumerate(rows):
        for j, b in enumerate(rows):
            if i != j:
                above += math.fsum(a * b)
                below += math.sqrt(math.fsum(a * a)) * math.sqrt(math.fsum(b * b))
    return above / below if below else NAN


def naive_mean(values):
    defined = [value for value in values if not math.isnan(value)]
    return math.fsum(defined) / len(defined) if defined else NAN


@given(gradients())
def test_every_form_agrees_with_naive_loops(rows):
    cosines_WW = direction.cosines_from_gram(direction.gram(rows))
    pairs = naive_pairs(rows)
    defined = [value for value in pairs if not math.isnan(value)]
    np.testing.assert_allclose(direction.upper_triangle(cosines_WW), pairs, atol=1e-11)
    expected = naive_mean(pairs), min(defined, default=NAN)
    np.testing.assert_allclose(direction.mean_and_min_cosine(cosines_WW), expected, atol=1e-11)
    np.testing.assert_allclose(
        direction.norm_weighted_cosine(direction.gram(rows)), naive_weighted(rows), atol=1e-11
    )


@given(gradients(min_workers=2))
def test_leave_one_out_agrees_with_the_sum_of_the_others(rows):
    found = direction.leave_one_out(direction.gram(rows))
    for i, row in enumerate(rows):
        rest = np.delete(rows, i, axis=0).sum(axis=0)
        if np.linalg.norm(rest) == 0:
            assert math.isnan(found[i])
        else:
            np.testing.assert_allclose(found[i], naive_cosine(row, rest), atol=1e-9)


@pytest.mark.parametrize(("num_workers", "scale"), [(2, 1e30), (3, 1.0), (130, 1e-30)])
def test_identical_gradients_have_cosine_exactly_one(num_workers, scale):
    row = np.random.default_rng(num_workers).standard_normal(4093) * scale
    gram_WW = direction.gram(np.tile(row.astype(np.float32), (num_workers, 1)))
    assert (direction.cosines_from_gram(gram_WW) == 1.0).all()
    assert (direction.leave_one_out(gram_WW) == 1.0).all()
    assert direction.norm_weighted_cosine(gram_WW) == 1.0
    assert direction.mean_and_min_cosine(direction.cosines_from_gram(gram_WW))[0] == 1.0


@pytest.mark.parametrize("poison", [0.0, np.nan, np.inf])
def test_a_worker_without_direction_is_left_out(poison):
    rows = np.random.default_rng(3).standard_normal((4, 50))
    healthy = np.delete(rows, 1, axis=0)
    rows[1] = 0.0
    rows[1, 7] = poison
    gram_WW = direction.gram(rows)
    cosines_WW = direction.cosines_from_gram(gram_WW)
    assert np.isnan(cosines_WW[1]).all()
    assert np.isnan(cosines_WW[:, 1]).all()
    mean = naive_mean(naive_pairs(healthy))
    assert direction.mean_and_min_cosine(cosines_WW)[0] == pytest.approx(mean, abs=1e-12)
    assert direction.norm_weighted_cosine(gram_WW) == pytest.approx(
        naive_weighted(healthy), abs=1e-12
    )
    rest = direction.leave_one_out(gram_WW)
    assert math.isnan(rest[1])
    assert rest[0] == pytest.approx(naive_cosine(rows[0], rows[2] + rows[3]), abs=1e-12)


@given(gradients(min_workers=3))
def test_the_upper_triangle_holds_the_whole_matrix(rows):
    cosines_WW = direction.cosines_from_gram(direction.gram(rows))
    if np.isfinite(cosines_WW.diagonal()).sum() == 1:
        return  # a single direction has no pair that could tell of it
    again = direction.from_upper_triangle(direction.upper_triangle(cosines_WW), len(rows))
    np.testing.assert_array_equal(again, cosines_WW)


def workers(num_workers, seed=0, width=127, num_groups=2, common=0.3):
    """Return sketches ``[W, K]`` with something in common, and group sketches ``[g, W, 31]``."""
    rng = np.random.default_rng(seed)
    sketches = rng.normal(size=(num_workers, width)) + common * rng.normal(size=width)
    groups = rng.normal(size=(num_groups, num_workers, 31)) + rng.normal(size=31)
    lengths = rng.lognormal(size=(num_workers, 1))
    return (sketches * lengths).astype(np.float32), groups.astype(np.float32)


def through_halves(rows):
    """Return rows as they arrive at the root when they are not folded."""
    return direction.narrow(rows, rows.shape[-1]).widened()


def check_against_pairs(sketches, groups, tolerance, given=None):
    consensus = direction.consensus_of(*((sketches, groups) if given is None else given))
    gram_WW = direction.gram(sketches)
    close = {"rtol": 0, "atol": tolerance, "equal_nan": True}
    np.testing.assert_allclose(consensus.cosine_rest_W, direction.leave_one_out(gram_WW), **close)
    for g, rows in enumerate(groups):
        exact_W = direction.leave_one_out(direction.gram(rows))
        np.testing.assert_allclose(consensus.group_cosine_rest_Wg[:, g], exact_W, **close)
    values = direction.step_values(consensus)
    exact_mean = direction.mean_and_min_cosine(direction.cosines_from_gram(gram_WW))[0]
    assert values["cosine_mean"] == pytest.approx(exact_mean, abs=tolerance, nan_ok=True)
    exact_weighted = direction.norm_weighted_cosine(gram_WW)
    assert values["cosine_weighted"] == pytest.approx(exact_weighted, abs=tolerance, nan_ok=True)
    assert values["directions_undefined"] == (~direction.has_direction(gram_WW)).sum()
    assert np.isnan(values["cosine_min"])


@pytest.mark.parametrize(("num_workers", "common"), [(3, 0.3), (10, 10.0), (65, 0.0)])
def test_it_finds_what_all_pairs_give(num_workers, common):
    sketches, groups = workers(num_workers, seed=num_workers, common=common)
    check_against_pairs(sketches, groups, 1e-11)
    halves = through_halves(sketches), np.stack([through_halves(rows) for rows in groups])
    check_against_pairs(sketches, groups, 1e-4, halves)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_worker_that_is_not_finite_leaves_the_others_as_they_are_without_it(bad):
    sketches, groups = workers(9)
    sketches[4, 7] = groups[1, 4, 3] = bad
    found = direction.consensus_of(
        through_halves(sketches), np.stack([through_halves(r) for r in groups])
    )
    others = np.arange(9) != 4
    kept = np.stack([through_halves(rows[others]) for rows in groups])
    expected = direction.consensus_of(through_halves(sketches[others]), kept)
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
        found = direction.consensus_of(
            rows, np.stack([np.repeat(g, num_workers, axis=0) for g in groups])
        )
        assert set(found.cosine_rest_W) == {1.0}
        assert set(found.group_cosine_rest_Wg.ravel()) == {1.0}
        assert found.cosine_mean == found.cosine_weighted == 1.0


def test_folding_is_linear_and_leaves_narrow_rows_alone():
    rows = np.random.default_rng(0).integers(-9, 9, size=(2, 1021)).astype(np.float32)
    np.testing.assert_array_equal(
        direction.fold(rows, 251).sum(axis=0), direction.fold(rows.sum(0)[None], 251)[0]
    )
    assert direction.fold(rows, 1021) is rows
    signs = direction.fold(np.eye(1021, dtype=np.float32), 251).sum(axis=1)
    assert set(signs) == {-1.0, 1.0}
    assert abs(signs.sum()) < 100

"""Directions against naive loops over gradients in float64, and what must not change them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rankscope.stats.direction import (
    cosines_from_gram,
    from_upper_triangle,
    gram,
    leave_one_out,
    leave_one_out_from_mean,
    mean_and_min_cosine,
    norm_weighted_cosine,
    upper_triangle,
)

NAN = float("nan")


def gradients(min_workers=1, max_workers=6):
    """Gradients of moderate numbers; rows of zeros occur."""
    numbers = st.integers(-50, 50).map(lambda n: n / 8)
    shapes = st.tuples(st.integers(min_workers, max_workers), st.integers(1, 7))
    return shapes.flatmap(lambda shape: arrays(np.float64, shape, elements=numbers))


def naive_cosine(a, b):
    length = math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(x * x for x in b))
    if length == 0 or not math.isfinite(length):
        return NAN
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / length


def naive_pairs(rows):
    return [
        naive_cosine(rows[i], rows[j]) for i in range(len(rows)) for j in range(i + 1, len(rows))
    ]


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
    cosines_WW = cosines_from_gram(gram(rows))
    pairs = naive_pairs(rows)
    defined = [value for value in pairs if not math.isnan(value)]
    np.testing.assert_allclose(upper_triangle(cosines_WW), pairs, atol=1e-11)
    np.testing.assert_allclose(mean_and_min_cosine(cosines_WW)[0], naive_mean(pairs), atol=1e-11)
    np.testing.assert_allclose(
        mean_and_min_cosine(cosines_WW)[1], min(defined, default=NAN), atol=1e-11
    )
    np.testing.assert_allclose(norm_weighted_cosine(gram(rows)), naive_weighted(rows), atol=1e-11)


@given(gradients(min_workers=2))
def test_leave_one_out_agrees_with_the_sum_of_the_others(rows):
    found = leave_one_out(gram(rows))
    for i, row in enumerate(rows):
        rest = np.delete(rows, i, axis=0).sum(axis=0)
        if np.linalg.norm(rest) == 0:
            assert math.isnan(found[i])
        else:
            np.testing.assert_allclose(found[i], naive_cosine(row, rest), atol=1e-9)


@given(gradients(min_workers=2))
def test_each_against_the_rest_follows_from_norms_and_the_mean(rows):
    mean, norms_W = rows.mean(axis=0), np.linalg.norm(rows, axis=1)
    found = leave_one_out_from_mean(norms_W, float(np.linalg.norm(mean)), rows @ mean)
    for i, row in enumerate(rows):
        rest = np.delete(rows, i, axis=0).sum(axis=0)
        size = norms_W[i] + np.linalg.norm(rows.sum(axis=0))
        if np.linalg.norm(rest) > 1e-2 * size and norms_W[i] > 1e-2 * size:
            np.testing.assert_allclose(found[i], naive_cosine(row, rest), atol=1e-7)


@pytest.mark.parametrize(("num_workers", "scale"), [(2, 1e30), (3, 1.0), (130, 1e-30)])
def test_identical_gradients_have_cosine_exactly_one(num_workers, scale):
    row = np.random.default_rng(num_workers).standard_normal(4093) * scale
    rows = np.tile(row.astype(np.float32), (num_workers, 1))
    gram_WW = gram(rows)
    assert (cosines_from_gram(gram_WW) == 1.0).all()
    assert (leave_one_out(gram_WW) == 1.0).all()
    assert norm_weighted_cosine(gram_WW) == 1.0
    assert mean_and_min_cosine(cosines_from_gram(gram_WW))[0] == 1.0


@pytest.mark.parametrize("poison", [0.0, np.nan, np.inf])
def test_a_worker_without_direction_is_left_out(poison):
    rows = np.random.default_rng(3).standard_normal((4, 50))
    healthy = np.delete(rows, 1, axis=0)
    rows[1] = 0.0
    rows[1, 7] = poison
    gram_WW = gram(rows)
    cosines_WW = cosines_from_gram(gram_WW)
    assert np.isnan(cosines_WW[1]).all()
    assert np.isnan(cosines_WW[:, 1]).all()
    assert mean_and_min_cosine(cosines_WW)[0] == pytest.approx(
        naive_mean(naive_pairs(healthy)), abs=1e-12
    )
    assert norm_weighted_cosine(gram_WW) == pytest.approx(naive_weighted(healthy), abs=1e-12)
    rest = leave_one_out(gram_WW)
    assert math.isnan(rest[1])
    assert rest[0] == pytest.approx(naive_cosine(rows[0], rows[2] + rows[3]), abs=1e-12)


@given(gradients(min_workers=3))
def test_the_upper_triangle_holds_the_whole_matrix(rows):
    cosines_WW = cosines_from_gram(gram(rows))
    if np.isfinite(cosines_WW.diagonal()).sum() == 1:
        return  # a single direction has no pair that could tell of it
    again = from_upper_triangle(upper_triangle(cosines_WW), len(rows))
    np.testing.assert_array_equal(again, cosines_WW)

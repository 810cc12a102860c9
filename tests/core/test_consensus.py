"""The consensus against all pairs of the same sketches, and what one bad worker must not change."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.core.consensus import (
    GROUPS_PER_STEP,
    SKETCH_WIDTH,
    consensus_of,
    contribution,
    groups_in_turn,
    step_values,
)
from rankscope.core.direction import (
    cosines_from_gram,
    gram,
    has_direction,
    leave_one_out,
    mean_cosine,
    norm_weighted_cosine,
)

NAN = float("nan")
BY_FLOAT32 = 2e-6  # what a sum in float32 may change


def workers(num_workers, seed=0, width=127, num_groups=2, common=0.3):
    """Return sketches ``[W, K]`` with something in common, and group sketches ``[W, g, 31]``."""
    rng = np.random.default_rng(seed)
    sketches = rng.normal(size=(num_workers, width)) + common * rng.normal(size=width)
    groups = rng.normal(size=(num_workers, num_groups, 31)) + rng.normal(size=31)
    lengths = rng.lognormal(size=(num_workers, 1))
    return (sketches * lengths).astype(np.float32), groups.astype(np.float32)


def agree(sketches, groups, dtype=np.float64):
    """Run a step: return every worker's consensus, their reports, and rank 0's values."""
    parts = [contribution(*own) for own in zip(sketches, groups, strict=True)]
    total = np.sum(parts, axis=0, dtype=dtype)
    found = [consensus_of(total, *own) for own in zip(sketches, groups, strict=True)]
    reports = np.stack([one.report() for one in found])
    return found, reports, step_values(found[0], reports)


def check_against_pairs(sketches, groups, dtype, tolerance):
    found, reports, values = agree(sketches, groups, dtype)
    gram_WW = gram(sketches)
    close = {"rtol": 0, "atol": tolerance, "equal_nan": True}
    np.testing.assert_allclose([one.cosine_rest for one in found], leave_one_out(gram_WW), **close)
    for g in range(groups.shape[1]):
        exact = leave_one_out(gram(groups[:, g]))
        np.testing.assert_allclose([one.group_cosine_rest_g[g] for one in found], exact, **close)
        np.testing.assert_allclose(reports[:, 3 + g], exact, rtol=0, atol=tolerance + 1e-7)
    exact_mean = mean_cosine(cosines_from_gram(gram_WW))
    # contributions are float32, so unit sketches are not quite of length 1
    assert values["cosine_mean"] == pytest.approx(exact_mean, abs=tolerance + 6e-8)
    assert values["cosine_weighted"] == pytest.approx(
        norm_weighted_cosine(gram_WW), abs=tolerance + 1e-7
    )
    assert values["directions_undefined"] == (~has_direction(gram_WW)).sum()
    assert np.isnan(values["cosine_min"])


@pytest.mark.parametrize("num_workers", [3, 10, 65, 100])
@pytest.mark.parametrize("common", [0.0, 0.3, 10.0])
def test_it_finds_what_all_pairs_give(num_workers, common):
    sketches, groups = workers(num_workers, seed=num_workers, common=common)
    check_against_pairs(sketches, groups, np.float64, 1e-9)
    check_against_pairs(sketches, groups, np.float32, BY_FLOAT32)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_one_worker_that_is_not_finite_leaves_the_others_as_they_are_without_it(bad):
    sketches, groups = workers(9)
    sketches[4, 7] = groups[4, 1, 3] = bad
    found, _, values = agree(sketches, groups)
    others = np.arange(9) != 4
    expected, _, expected_values = agree(sketches[others], groups[others])
    assert [
        one.cosine_rest for one, other in zip(found, others, strict=True) if other
    ] == pytest.approx([one.cosine_rest for one in expected], abs=1e-12)
    assert values["cosine_mean"] == pytest.approx(expected_values["cosine_mean"], abs=1e-12)
    assert values["cosine_weighted"] == pytest.approx(expected_values["cosine_weighted"])
    assert values["directions_undefined"] == 1
    assert np.isnan(found[4].cosine_rest)
    assert np.isnan(found[4].group_cosine_rest_g[1])
    assert not np.isnan(found[4].group_cosine_rest_g[0])


@pytest.mark.parametrize("num_workers", [3, 10, 100])
def test_one_huge_worker_blurs_nobody_but_itself(num_workers):
    sketches, groups = workers(num_workers)
    sketches[1] *= 1e6 / np.linalg.norm(sketches[1])
    check_against_pairs(sketches, groups, np.float64, 1e-9)
    found, _, values = agree(sketches, groups, np.float32)
    exact = leave_one_out(gram(sketches))
    for rank, one in enumerate(found):
        assert one.cosine_rest == pytest.approx(exact[rank], abs=0.05 if rank == 1 else 1e-6)
    weighted = norm_weighted_cosine(gram(sketches))
    assert values["cosine_weighted"] == pytest.approx(weighted, abs=0.03)
    assert np.isfinite(found[0].cosine_mean)


def test_identical_workers_have_cosine_one_exactly():
    [sketch], [group] = workers(1)
    for num_workers in (2, 3, 100):
        found, _, values = agree([sketch] * num_workers, [group] * num_workers, np.float32)
        assert {one.cosine_rest for one in found} == {1.0}
        assert {x for one in found for x in one.group_cosine_rest_g} == {1.0}
        assert values["cosine_mean"] == values["cosine_weighted"] == 1.0


def test_opposite_workers_have_cosine_minus_one():
    [sketch], [group] = workers(1)
    found, _, values = agree(np.stack([sketch, -2 * sketch]), [group, group], np.float32)
    assert [one.cosine_rest for one in found] == [-1.0, -1.0]
    assert values["cosine_mean"] == values["cosine_weighted"] == -1.0


def test_zero_gradients_have_no_direction():
    sketches, groups = workers(5)
    sketches[[0, 2]] = 0
    check_against_pairs(sketches, groups, np.float64, 1e-9)


@pytest.mark.parametrize("num_workers", [1, 4])
def test_without_two_directions_nothing_is_defined(num_workers):
    sketches, groups = workers(num_workers)
    sketches[1:] = 0
    found, _, values = agree(sketches, groups)
    assert all(np.isnan(one.cosine_rest) for one in found)
    assert np.isnan(values["cosine_mean"])
    assert np.isnan(values["cosine_weighted"])
    assert values["directions_undefined"] == num_workers - 1


def test_others_that_cancel_have_no_direction():
    [sketch], [group] = workers(1)
    other = np.roll(sketch, 1)
    found, _, _ = agree(np.stack([sketch, other, -other]), [group] * 3, np.float32)
    assert np.isnan(found[0].cosine_rest)


@given(st.permutations(range(7)))
def test_the_order_of_workers_does_not_matter(order):
    sketches, groups = workers(7)
    found, _, values = agree(sketches, groups, np.float32)
    moved, _, moved_values = agree(sketches[order], groups[order], np.float32)
    for position, rank in enumerate(order):
        assert moved[position].cosine_rest == pytest.approx(found[rank].cosine_rest, abs=1e-6)
    assert moved_values == pytest.approx(values, abs=1e-6, nan_ok=True)


def test_the_mean_errs_as_the_docs_say_and_less_with_width():
    rng = np.random.default_rng(1)
    num_workers, size = 65, 4000
    errors = {}
    for width in (61, 251, 1021):
        squares = []
        for _ in range(12):
            rows = rng.normal(size=(num_workers, size)) + 0.3 * rng.normal(size=size)
            exact = mean_cosine(cosines_from_gram(gram(rows)))
            signs, buckets = rng.choice([-1.0, 1.0], size), np.arange(size) % width
            sketches = np.stack([np.bincount(buckets, row * signs, width) for row in rows])
            _, _, values = agree(sketches.astype(np.float32), np.zeros((num_workers, 0, 31)))
            squares.append((values["cosine_mean"] - exact) ** 2)
        errors[width] = np.sqrt(np.mean(squares))
        promised = np.sqrt(2 / width) * (exact + 1 / num_workers) * (1 - exact)
        assert errors[width] < 1.7 * promised
    assert errors[1021] < errors[251] < errors[61]


def test_a_total_of_another_layout_is_refused():
    [sketch], [group] = workers(1)
    with pytest.raises(ValueError, match="expected a total of"):
        consensus_of(np.zeros(5), sketch, group)


@pytest.mark.parametrize("num_groups", [1, 4, 5, 40, 41])
def test_every_group_has_its_turn_equally_often(num_groups):
    per_step = min(GROUPS_PER_STEP, num_groups)
    turns = [groups_in_turn(turn, num_groups) for turn in range(num_groups)]
    assert all(len(set(turn.tolist())) == per_step for turn in turns)
    assert np.bincount(np.concatenate(turns), minlength=num_groups).tolist() == (
        [per_step] * num_groups
    )


def test_without_groups_nobody_has_a_turn():
    assert groups_in_turn(3, 0).tolist() == []


def test_a_step_of_1024_workers_fits_into_64_kilobytes():
    own = contribution(np.ones(SKETCH_WIDTH, np.float32), np.ones((GROUPS_PER_STEP, 251)))
    moved = 4 * (1 - 1 / 1024) * (own.nbytes + 10 * 8)
    headers = 2 * 320 * 20
    assert moved + headers + 1450 < 64_000

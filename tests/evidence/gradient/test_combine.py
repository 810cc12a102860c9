import numpy as np
import pytest

from rankscope.evidence.gradient.combine import normalise_user_reduction
from rankscope.stats.audit import AuditPart

W, S, K = 4, 6, 31


@pytest.fixture(name="local_WSK")
def make_local():
    return np.random.default_rng(0).normal(size=(W, S, K)).astype(np.float32)


def parts_of(local_WSK, given_WSK):
    squares_WS = np.square(given_WSK, dtype=np.float64).sum(2)
    return [AuditPart(*each) for each in zip(local_WSK, given_WSK, squares_WS, strict=True)]


def everywhere(given_SK):
    return np.stack([given_SK.astype(np.float32)] * W)


@pytest.mark.parametrize("factor", [4.0, 2.0**-16])
def test_a_multiple_of_the_mean_becomes_the_mean(local_WSK, factor):
    mean_SK = local_WSK.mean(0, dtype=np.float64)
    found = normalise_user_reduction(parts_of(local_WSK, everywhere(factor * mean_SK)))
    assert found.factor == pytest.approx(factor, rel=1e-6)
    for part in found.parts_W:
        np.testing.assert_allclose(part.reduced_SK, mean_SK, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(part.reduced_squares_S, np.square(mean_SK).sum(1), rtol=1e-5)
    assert not found.unreduced_W.any()


def test_a_wrong_section_stays_wrong_and_changes_no_other(local_WSK):
    given_SK = 4 * local_WSK.mean(0, dtype=np.float64)
    given_SK[2] *= 1.5
    found = normalise_user_reduction(parts_of(local_WSK, everywhere(given_SK)))
    assert found.factor == 4
    np.testing.assert_allclose(found.parts_W[1].reduced_SK, given_SK / 4, rtol=1e-6)


def test_what_is_still_each_worker_s_own_is_no_reduction(local_WSK):
    given_WSK = local_WSK * np.array([0.1, 0.5, 2, 1], np.float32)[:, None, None]
    found = normalise_user_reduction(parts_of(local_WSK, given_WSK))
    assert found.unreduced_W.all()
    assert all(np.isnan(part.reduced_SK).all() for part in found.parts_W)


def test_workers_that_have_the_same_gradient_are_not_called_unreduced(local_WSK):
    same_WSK = everywhere(local_WSK[0])
    found = normalise_user_reduction(parts_of(same_WSK, same_WSK))
    assert found.factor == 1
    assert not found.unreduced_W.any()


@pytest.mark.parametrize("wrong", [None, 2])
def test_shares_of_owners_add_up_to_the_mean_and_a_wrong_one_stays_wrong(local_WSK, wrong):
    mean_SK = local_WSK.mean(0, dtype=np.float64)
    given_WSK = np.zeros_like(local_WSK)
    for section in range(S):
        given_WSK[section % W, section] = 4 * mean_SK[section]
    if wrong is not None:
        given_WSK[wrong % W, wrong] = 4 * local_WSK[wrong % W, wrong]
    found = normalise_user_reduction(parts_of(local_WSK, given_WSK), in_shares=True)
    assert found.factor == 4
    total_SK = sum(part.reduced_SK for part in found.parts_W)
    right_S = np.isclose(total_SK, mean_SK, rtol=1e-5, atol=1e-7).all(1)
    assert np.flatnonzero(~right_S).tolist() == ([] if wrong is None else [wrong])


@pytest.mark.parametrize(
    ("weights_W", "noise", "known"),
    [([1, 1, 8, 1], 0.0, True), ([1, 1, 1, 1], 3.0, False)],
    ids=["one worker counts more", "noise is added"],
)
def test_a_loop_may_mean_another_gradient_than_a_sum(local_WSK, weights_W, noise, known):
    given_SK = np.einsum("w,wsk->sk", weights_W, local_WSK) / W
    given_SK += noise * np.random.default_rng(1).standard_normal(given_SK.shape)
    found = normalise_user_reduction(parts_of(local_WSK, everywhere(given_SK))).parts_W[0]
    assert np.isfinite(found.reduced_SK).all() == known
    assert np.isfinite(found.reduced_squares_S).all()


def test_gradients_of_experts_by_place_are_not_held_against_the_mean_of_all(local_WSK):
    given_WSK = everywhere(local_WSK.mean(axis=0))
    given_WSK[:, 1] = given_WSK[[0, 1, 0, 1], 1] * np.array([1, 2, 1, 2], np.float32)[:, None]
    found = normalise_user_reduction(parts_of(local_WSK, given_WSK))
    assert found.factor == 1
    others = [0, *range(2, S)]
    for part, given_SK in zip(found.parts_W, given_WSK, strict=True):
        assert np.isnan(part.reduced_SK[1]).all()
        np.testing.assert_array_equal(part.reduced_SK[others], given_SK[others])

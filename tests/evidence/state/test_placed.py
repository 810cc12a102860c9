"""Trained parameters that a loop shares out over ranks by itself, as parallel experts."""

import numpy as np
import pytest

from rankscope.bus.finding import Severity
from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.bus.step import StepReport
from rankscope.evidence.gradient.combine import normalise_user_reduction
from rankscope.evidence.state.unequal import UnequalState
from rankscope.stats.audit import AuditPart
from support.stepping import evidence_of
from support.streams import gathered

WORKERS = 4
NONE = np.zeros(WORKERS, bool)


def found_of(parameters, gradients, *, by_loop=True):
    """Return keys and severities for an expert with these digests of the workers."""
    columns = {"replica": np.zeros(WORKERS, np.int64), "optimizer_steps": np.ones(WORKERS)}
    step = gathered(7, [[]] * WORKERS, **columns)
    kinds = {
        StateKind.PARAMETER: parameters,
        StateKind.APPLIED: gradients,
        StateKind.OPTIMIZER: parameters,
    }
    differences = tuple(
        StateDifference(kind, "expert", np.array(digests), NONE)
        for kind, digests in kinds.items()
        if len(set(digests)) > 1
    )
    object.__setattr__(step, "differences", differences)
    detector = UnequalState(WORKERS, by_loop=by_loop)
    return {one.key: one.severity for one in evidence_of(detector, StepReport(step, {}))}


def test_experts_by_place_are_a_note():
    assert found_of([1, 2, 1, 2], [3, 4, 3, 4]) == {"trained-by-place": Severity.NOTE}


@pytest.mark.parametrize(
    ("parameters", "gradients", "by_loop"),
    [
        ([1, 2, 1, 2], [3, 3, 3, 3], True),  # another seed on each second rank
        ([1, 2, 1, 3], [3, 4, 3, 4], True),  # one of them differs
        ([1, 2, 3, 4], [5, 6, 7, 8], True),  # nobody holds the same
        ([1, 2, 1, 2], [3, 4, 3, 4], False),  # a wrapper reduces all of them
    ],
)
def test_other_differences_are_errors(parameters, gradients, by_loop):
    found = found_of(parameters, gradients, by_loop=by_loop)
    assert found["state.parameters_differ"] is Severity.ERROR


@pytest.mark.parametrize(
    ("weights_W", "noise", "known"),
    [([1, 1, 8, 1], 0.0, True), ([1, 1, 1, 1], 3.0, False)],
    ids=["one worker counts more", "noise is added"],
)
def test_a_loop_may_mean_another_gradient_than_a_sum_of_the_workers_own(weights_W, noise, known):
    rng = np.random.default_rng(0)
    local_WSK = rng.standard_normal((WORKERS, 3, 31)).astype(np.float32)
    given_SK = np.einsum("w,wsk->sk", weights_W, local_WSK) / WORKERS
    given_SK += noise * rng.standard_normal(given_SK.shape)
    given_WSK = np.stack([given_SK.astype(np.float32)] * WORKERS)
    squares_WS = np.square(given_WSK).sum(axis=2)
    parts = [AuditPart(*each) for each in zip(local_WSK, given_WSK, squares_WS, strict=True)]
    found = normalise_user_reduction(parts).parts_W[0]
    assert np.isfinite(found.reduced_SK).all() == known
    assert np.isfinite(found.reduced_squares_S).all()


def test_their_gradients_are_not_held_against_the_mean_of_all():
    rng = np.random.default_rng(0)
    local_WSK = rng.standard_normal((WORKERS, 3, 31)).astype(np.float32)
    given_WSK = np.stack([local_WSK.mean(axis=0)] * WORKERS)
    given_WSK[:, 1] = given_WSK[[0, 1, 0, 1], 1] * np.array([1, 2, 1, 2], np.float32)[:, None]
    squares_WS = np.square(given_WSK).sum(axis=2)
    parts = [AuditPart(*each) for each in zip(local_WSK, given_WSK, squares_WS, strict=True)]
    found = normalise_user_reduction(parts)
    assert found.factor == 1
    for part, given_SK in zip(found.parts_W, given_WSK, strict=True):
        assert np.isnan(part.reduced_SK[1]).all()
        np.testing.assert_array_equal(part.reduced_SK[[0, 2]], given_SK[[0, 2]])

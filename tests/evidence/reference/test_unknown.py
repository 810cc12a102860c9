"""A reference step at the root agrees only where workers and losses are known."""

from types import SimpleNamespace

import numpy as np
import pytest

from rankscope.bus.plan import Plan
from rankscope.evidence.reference.root import Verifications
from rankscope.evidence.reference.share import ReferenceShare

W = 3


def share(terms_MPK, given_PK, **more):
    """Return a worker's share, of two parameters."""
    return ReferenceShare(
        names=("up.weight", "down.weight"),
        types=("float32",) * 2,
        terms_MPK=terms_MPK,
        norms_MP=np.linalg.norm(terms_MPK, axis=2),
        given_PK=given_PK,
        reduced_PK=given_PK,
        unsteady_P=np.zeros(2),
        replicas_PK=np.empty((0, 31), np.float32),
        copies=W,
        **more,
    )


def judged(*, factor=1.0, losses=None, digests=({}, {}, {})):
    """Return the finding of W workers, whose backward passes had a factor on their losses."""
    draw = np.random.default_rng(0)
    terms = draw.standard_normal((W, 1, 2, 31)).astype(np.float32) * factor
    given = terms.mean(axis=0)[0]
    values = draw.uniform(2, 3, W)
    found = []
    root = Verifications(W, Plan.of(None), found.append)
    for rank in range(W):
        root_of = (values[rank] * factor,)
        part = share(terms[rank], given, digests=digests[rank], roots_M=root_of)
        root.take(rank, 5, part.pack())
    unknown = tuple(np.array([np.nan]) for _ in range(W))
    step = SimpleNamespace(
        step=5,
        workers={"loss_divided": np.zeros(W)},
        micro_scales=unknown,
        micro_weights=unknown,
        micro_losses=unknown if losses is None else tuple(np.array([v]) for v in losses(values)),
    )
    root.observe(step, (), (), 5)
    (finding,) = found
    return finding


def test_a_loss_that_is_not_known_may_have_any_factor():
    finding = judged()
    assert finding.cause == "verify.declined"
    assert "the factor between the loss" in finding.explanation


@pytest.mark.parametrize(("factor", "cause"), [(1.0, "verify.agrees"), (1 / W, "verify.scale")])
def test_a_loss_given_after_its_backward_pass_has_the_factor_of_its_value(factor, cause):
    finding = judged(factor=factor, losses=lambda values: values)
    assert finding.cause == cause
    assert ("averaged over the workers twice" in finding.explanation) == (factor != 1)


def test_a_loss_to_which_something_was_added_has_no_known_factor():
    finding = judged(losses=lambda values: values - 0.1)
    assert finding.cause == "verify.declined"


def test_workers_that_hold_other_parameters_have_no_common_gradient():
    digests = ({"up.weight": 1, "down.weight": 2}, {"up.weight": 1, "down.weight": 2})
    finding = judged(digests=(*digests, {"up.weight": 1, "down.weight": 3}))
    assert finding.cause == "verify.declined"
    assert "different values of down.weight" in finding.explanation


@pytest.mark.parametrize(
    ("second", "cause"), [([4, 5, 6], "verify.weighting"), ([1, 2, 3], "verify.declined")]
)
def test_two_losses_of_the_same_samples_are_no_micro_batches(second, cause):
    draw = np.random.default_rng(0)
    scales = np.array([1.0, 0.2])
    terms = draw.standard_normal((W, 2, 2, 31)).astype(np.float32)
    terms *= scales[:, None, None].astype(np.float32)
    given = terms.sum(axis=1).mean(axis=0)
    found = []
    root = Verifications(W, Plan.of(None), found.append)
    for rank in range(W):
        root.take(rank, 5, share(terms[rank], given).pack())
    step = SimpleNamespace(
        step=5,
        workers={"loss_divided": np.zeros(W)},
        micro_scales=(scales,) * W,
        micro_weights=(np.full(2, np.nan),) * W,
        micro_losses=(np.ones(2),) * W,
        samples=(np.array([1, 2, 3, *second]),) * W,
    )
    root.observe(step, (), (), 5)
    assert [one.cause for one in found] == [cause]

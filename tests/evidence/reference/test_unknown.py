"""A reference step at the root agrees only where workers and losses are known."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rankscope.bus.probe import DirectedRun
from rankscope.evidence.reference.director import Verifications
from support.reference_share import share_of

W = 3
NAMES = ("up.weight", "down.weight")


def judged(*, factor=1.0, losses=None, digests=({}, {}, {})):
    """Return the finding of W workers, whose backward passes had a factor on their losses."""
    draw = np.random.default_rng(0)
    terms = draw.standard_normal((W, 1, 2, 31)).astype(np.float32) * factor
    given = terms.mean(axis=0)[0]
    values = draw.uniform(2, 3, W)
    found = []
    root = Verifications(DirectedRun(W, 0, Path(), report=found.append))
    for rank in range(W):
        root_of = (values[rank] * factor,)
        more = {"digests": digests[rank], "roots_M": root_of, "copies": W}
        part = share_of(NAMES, terms[rank], given, **more)
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


def test_workers_that_hold_other_parameters_have_no_common_gradient():
    digests = ({"up.weight": 1, "down.weight": 2}, {"up.weight": 1, "down.weight": 2})
    finding = judged(digests=(*digests, {"up.weight": 1, "down.weight": 3}))
    assert finding.cause == "verify.declined"
    assert "different values of down.weight" in finding.explanation

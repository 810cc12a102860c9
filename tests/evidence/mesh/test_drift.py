"""Weights that pipeline stages share: which drift is a fault, and what is said of it."""

import math

import pytest

from rankscope.evidence.mesh.director import Replicated, TieVerdict

EMBEDDING = "embedding.weight = head.weight"
WORKERS = {0: 0, 1: 1}


def one(digest, parameter=0.0, gradient=0.0, *, same=None, factor=math.nan, line=(0, 2)):
    same = parameter == 0 if same is None else same
    return Replicated(
        EMBEDDING, line, False, False, parameter, gradient, line, 2.0**-12,
        same=same, digest=digest, factor=factor,
    )  # fmt: skip


def observe(*steps, certain=(EMBEDDING,)):
    """Return the last state of each finding, by severity."""
    verdict = TieVerdict("pp", 0, certain)
    found = [each for step, weight in steps for each in verdict.observe(step, [weight], WORKERS)]
    return {str(finding.severity): finding for finding in found}


def test_weights_that_stay_equal_say_nothing_whatever_their_gradients_are():
    """An optimizer, or an average after its call, may keep them equal."""
    assert observe(*((step, one(step, gradient=1.0)) for step in range(9))) == {}


def test_gradients_that_are_not_summed_make_them_drift():
    found = observe((0, one(7, gradient=1.1)), (1, one(8, 1e-6, 1.1)))
    assert list(found) == ["warning"]
    finding = found["warning"]
    assert finding.cause == "sync.tied_weights"
    assert (finding.first_step, finding.ranks) == (1, (0,))
    assert f"The tied weight {EMBEDDING} drifts apart over pp since step 1" in finding.explanation
    assert "not added up over pp" in finding.explanation
    assert "only the first values were copied" in finding.next_check


def test_bits_that_differ_by_rounding_alone_are_no_drift():
    assert observe((0, one(7)), *((step, one(step, 1e-6, 1e-6)) for step in range(1, 9))) == {}
    assert list(observe((0, one(7)), (8, one(8, 1e-3)))) == ["warning"]


def test_after_an_update_that_kept_them_equal_it_is_an_error():
    found = observe(
        (0, one(7)), (1, one(8)), (2, one(8, gradient=0.5, factor=0.5)), (3, one(9, 0.1))
    )
    assert list(found) == ["error"]
    assert "scaled apart: one was 0.5 times the other" in found["error"].explanation
    assert "checkpoint before step 3" in found["error"].next_check


@pytest.mark.parametrize("later", [0.0, 0.2])
def test_other_values_that_are_loaded_before_the_first_step_end_the_tie(later):
    assert observe((0, one(7, 0.5)), (1, one(8, later, 1.0)), (2, one(9, 0.2, 1.0))) == {}

"""Gradients that are taken back after a sound reduction: held back, or clipped by layer."""

import numpy as np
import pytest

from rankscope.bus.finding import Severity
from rankscope.evidence.reference.share import ReferenceShare
from rankscope.evidence.reference.verify import ReferenceAnswer, verify
from rankscope.evidence.reference.words import verified

WORKERS, PARAMETERS, WIDTH = 2, 6, 31


def verified_with(factors, error=0.0):
    """Verify a step whose reduced gradients were multiplied by a factor of each parameter's own."""
    rng = np.random.default_rng(0)
    terms = rng.standard_normal((WORKERS, 1, PARAMETERS, WIDTH)).astype(np.float32)
    reduced = terms.mean(axis=(0, 1)) + np.float32(error)
    parts = [
        ReferenceShare(
            tuple(f"layers.{number}" for number in range(PARAMETERS)),
            ("float32",) * PARAMETERS,
            own,
            np.linalg.norm(own, axis=-1).astype(np.float64),
            (reduced * np.array(factors)[:, None]).astype(np.float32),
            reduced,
            np.zeros(PARAMETERS),
            copies=WORKERS,
        )
        for own in terms
    ]
    tokens = [np.full(1, np.nan)] * WORKERS
    found = verify(parts, [np.ones(1)] * WORKERS, tokens)
    return found, verified(found, 5, WORKERS, 1)


def test_a_layer_that_is_held_back_and_clipping_by_layer_are_right():
    found, finding = verified_with([0.0, 0.9, 0.5, 0.3, 0.1, 1.0])
    assert (found.answer, finding.severity) == (ReferenceAnswer.AGREES, Severity.NOTE)
    assert "times 0.1 to 0.9 of each parameter's own" in finding.explanation
    assert "without layers.0, held back after it" in finding.explanation


@pytest.mark.parametrize(
    "factors",
    [
        [0.5, 0.5, 1.0, 1.0, 1.0, 1.0],  # one factor of some
        [2.0, 0.9, 0.5, 0.3, 0.1, 1.0],  # one of them grows
        [-0.5, 0.9, 0.5, 0.3, 0.1, 1.0],
    ],
)
def test_other_changes_after_the_reduction_are_errors(factors):
    _, finding = verified_with(factors)
    assert finding.severity is Severity.ERROR


def test_a_reduction_that_is_wrong_is_an_error_whatever_comes_after():
    _, finding = verified_with([0.0, 0.9, 0.5, 0.3, 0.1, 1.0], error=0.5)
    assert finding.severity is Severity.ERROR

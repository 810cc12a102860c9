"""Whole batches that are the same on several workers."""

import numpy as np
import pytest

from rankscope.bus.finding import Severity
from rankscope.bus.step import StepReport
from rankscope.evidence.samples.repeats import DuplicateBatches
from support.stepping import evidence_of
from support.streams import gathered

PAIRS = [0, 0, 1, 1]
LOSSES = [2.0, 2.0, 1.5, 1.5]
NORMS = [1.0, 1.3, 0.9, 0.7]


def found(num_steps=4, batches=PAIRS, by_loop=False, **columns):
    """Return what is found in steps in which workers with one number draw one batch."""
    columns = {"loss": LOSSES, "grad_norm": NORMS, **columns}
    detector = DuplicateBatches(4, by_loop=by_loop)
    for step in range(num_steps):
        samples = [np.arange(4) + 1000 * step + 100 * number for number in batches]
        values = {
            name: np.array(value(step) if callable(value) else value)
            for name, value in columns.items()
        }
        evidence = evidence_of(detector, StepReport(gathered(step, samples, **values), {}))
    return evidence


def test_workers_that_share_the_work_on_each_sample_are_no_duplicates():
    assert found() == []
    measured_at_first = found(grad_norm=lambda step: [np.nan] * 4 if step else NORMS)
    assert measured_at_first == []


def test_all_workers_of_a_loop_may_share_the_work_which_is_a_note():
    [note] = found(by_loop=True, batches=[0] * 4, loss=[2.0] * 4)
    assert (note.cause, note.key) == ("data.duplicate_batches", "data-parts-of-one-model")
    assert (note.severity, note.ranks) == (Severity.NOTE, (0, 1, 2, 3))
    [error] = found(by_loop=True, batches=[0] * 4, loss=[2.0] * 4, grad_norm=[1.0] * 4)
    assert error.severity is Severity.ERROR


@pytest.mark.parametrize(
    "columns",
    [
        {"grad_norm": [1.0, 1.0, 0.9, 0.9]},  # the same gradients
        {"loss": [2.0, 2.1, 1.5, 1.5]},  # dropout
        {"batches": [0, 0, 0, 1], "loss": [2.0] * 4},  # groups of other sizes
        {"grad_norm": [np.nan] * 4},
    ],
)
def test_equal_batches_are_an_error(columns):
    [evidence] = found(**columns)
    assert (evidence.cause, evidence.severity) == ("data.duplicate_batches", Severity.ERROR)

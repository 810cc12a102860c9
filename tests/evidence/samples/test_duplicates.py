"""Whole batches that are the same on several workers, or in every epoch."""

from itertools import islice

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.finding import Severity
from rankscope.bus.step import MISSING_INT, StepReport
from rankscope.evidence.samples.repeats import DuplicateBatches, RepeatedOrder
from rankscope.record.states import pack_state, unpack_state
from support.stepping import describe, evidence_of
from support.streams import accumulated, gathered, sharded, with_replacement

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


@pytest.mark.parametrize(
    ("columns", "severity"),
    [
        ({}, Severity.WARNING),
        ({"rows_digest": [7] * 4}, Severity.ERROR),  # rows of the data set
        ({"loss": lambda step: [2.0] * 4 if step == 2 else [2.0, 2.1, 1.5, 1.6]}, Severity.ERROR),
    ],
)
def test_ids_of_the_training_alone_are_no_proof_where_losses_differ(columns, severity):
    """They may be places in each rank's own shard."""
    given = {"loss": [2.0, 2.1, 1.5, 1.6], "grad_norm": [1.0] * 4, "samples_named": [True] * 4}
    [evidence] = found(**{**given, **columns})
    assert (evidence.cause, evidence.severity) == ("data.duplicate_batches", severity)
    doubtful = severity is Severity.WARNING
    assert ("the ids are places in each rank's own shard" in describe(evidence)[0]) is doubtful


def digest(batch):
    """Return a digest that is blind to the order inside a batch, as the recorded one is."""
    return hash(tuple(sorted(int(sample) for sample in batch)))


def report_of(step, batches):
    digests = [digest(batch) if len(batch) else MISSING_INT for batch in batches]
    return summarize(gathered(step, batches, batch_digest=digests))


def watch_order(detector, stream, num_steps, first=0, memory=None):
    """Return all evidence; each must have words."""
    found = []
    for step, batches in enumerate(islice(stream, num_steps), start=first):
        found += evidence_of(detector, report_of(step, batches), memory=memory)
    for evidence in found:
        describe(evidence)
    return found


def test_the_same_order_names_period_and_first_step():
    found = watch_order(RepeatedOrder(), sharded(512, 4, 4, reshuffle=False), 96)
    assert found[0].severity is Severity.WARNING
    assert found[0].numbers == {"period": 32, "repeated_steps": 8}
    assert (found[0].first_step, found[0].last_step) == (32, 39)
    assert (found[-1].last_step, found[-1].count) == (95, 64)
    words, advice = describe(found[-1])
    assert "an epoch has 32 steps, and the next one repeats it" in words
    assert "Where something shuffles, call its set_epoch(epoch)" in advice


@pytest.mark.parametrize(
    ("order", "advice"),
    [
        ("nothing", "does not shuffle"),
        ("set_epoch", "Call set_epoch"),
        ("generator", "no set_epoch"),
    ],
)
def test_the_same_order_has_advice_that_fits_the_sampler(order, advice):
    detector = RepeatedOrder(order=order)
    found = watch_order(detector, sharded(512, 4, 4, reshuffle=False), 48)
    assert advice in describe(found[-1])[1]


@pytest.mark.parametrize(
    "stream",
    [
        lambda: sharded(512, 4, 4),
        lambda: sharded(8, 4, 2),
        lambda: accumulated(sharded(101, 4, 4), 3),
        lambda: with_replacement(100, 4, 4),
        lambda: iter(lambda: [np.empty(0, np.int64)] * 4, None),
    ],
)
def test_epochs_of_new_orders_are_silent(stream):
    assert watch_order(RepeatedOrder(), stream(), 400) == []


def test_a_few_batches_that_come_again_are_a_note():
    found = watch_order(RepeatedOrder(), sharded(48, 4, 4, reshuffle=False), 60)
    assert {one.severity for one in found} == {Severity.NOTE}
    assert found[0].numbers["period"] == 3


def test_one_worker_that_repeats_does_not_speak_for_all():
    def stream():
        for batches in sharded(4000, 4, 4):
            yield [np.arange(4), *batches[1:]]

    assert watch_order(RepeatedOrder(), stream(), 200) == []


def test_steps_that_an_older_checkpoint_repeats_are_silent():
    batches = list(islice(sharded(4096, 4, 4), 200))
    detector, again = RepeatedOrder(), RepeatedOrder()
    assert watch_order(detector, iter(batches), 120) == []
    detector.close()
    again.restore(unpack_state(pack_state(detector.state())))
    assert watch_order(again, iter(batches[80:]), 120, first=120) == []

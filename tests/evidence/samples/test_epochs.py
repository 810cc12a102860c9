"""The same order in every epoch, and what only looks like it."""

from itertools import islice

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.finding import Severity
from rankscope.bus.step import MISSING_INT
from rankscope.evidence.samples.repeats import RepeatedOrder
from rankscope.record.states import pack_state, unpack_state
from support.stepping import describe, evidence_of
from support.streams import accumulated, gathered, sharded, with_replacement


def digest(batch):
    """Return a digest that is blind to the order inside a batch, as the recorded one is."""
    return hash(tuple(sorted(int(sample) for sample in batch)))


def report(step, batches):
    digests = [digest(batch) if len(batch) else MISSING_INT for batch in batches]
    return summarize(gathered(step, batches, batch_digest=digests))


def watch(detector, stream, num_steps, first=0, memory=None):
    """Return all evidence; each must have words."""
    found = []
    for step, batches in enumerate(islice(stream, num_steps), start=first):
        found += evidence_of(detector, report(step, batches), memory=memory)
    for evidence in found:
        describe(evidence)
    return found


def test_the_same_order_names_period_and_first_step():
    found = watch(RepeatedOrder(), sharded(512, 4, 4, reshuffle=False), 96)
    assert found[0].severity is Severity.WARNING
    assert found[0].numbers == {"period": 32, "repeated_steps": 8}
    assert (found[0].first_step, found[0].last_step) == (32, 39)
    assert (found[-1].last_step, found[-1].count) == (95, 64)
    words, _ = describe(found[-1])
    assert "an epoch has 32 steps, and the next one repeats it" in words


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
    assert watch(RepeatedOrder(), stream(), 400) == []


def test_a_few_batches_that_come_again_are_a_note():
    found = watch(RepeatedOrder(), sharded(48, 4, 4, reshuffle=False), 60)
    assert {one.severity for one in found} == {Severity.NOTE}
    assert found[0].numbers["period"] == 3


def test_one_worker_that_repeats_does_not_speak_for_all():
    def stream():
        for batches in sharded(4000, 4, 4):
            yield [np.arange(4), *batches[1:]]

    assert watch(RepeatedOrder(), stream(), 200) == []


def test_steps_that_an_older_checkpoint_repeats_are_silent():
    batches = list(islice(sharded(4096, 4, 4), 200))
    detector, again = RepeatedOrder(), RepeatedOrder()
    assert watch(detector, iter(batches), 120) == []
    detector.close()
    again.restore(unpack_state(pack_state(detector.state())))
    assert watch(again, iter(batches[80:]), 120, first=120) == []

"""The same order in every epoch, and what only looks like it."""

from itertools import islice

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.finding import Severity
from rankscope.bus.step import MISSING_INT
from rankscope.bus.steps import RecentBatches
from rankscope.evidence.samples.repeats import PeriodFinder, RepeatedOrder
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


def test_a_long_period_must_come_again_in_a_good_part():
    found = watch(RepeatedOrder(), sharded(800, 2, 2, reshuffle=False), 300)
    assert found[0].last_step == 200 + 50 - 1


@pytest.mark.parametrize(
    "stream",
    [
        lambda: sharded(512, 4, 4),
        lambda: sharded(517, 4, 4),
        lambda: sharded(64, 4, 4),
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


def test_one_batch_for_ever_is_a_note():
    found = watch(RepeatedOrder(), iter(lambda: [np.arange(4), np.arange(4, 8)], None), 40)
    assert {one.severity for one in found} == {Severity.NOTE}


def own_cycles(periods):
    step = 0
    while True:
        yield [
            np.arange(4) + 100 * rank + 10 * (step % period) for rank, period in enumerate(periods)
        ]
        step += 1


def test_workers_that_go_round_in_few_batches_of_their_own_are_a_note_at_most():
    found = watch(RepeatedOrder(), own_cycles([3, 4, 5]), 300)  # together every 60 steps
    assert {one.severity for one in found} <= {Severity.NOTE}


def test_one_worker_that_repeats_does_not_speak_for_all():
    def stream():
        for batches in sharded(4000, 4, 4):
            yield [np.arange(4), *batches[1:]]

    assert watch(RepeatedOrder(), stream(), 200) == []


def test_repeats_that_are_announced_are_a_note():
    found = watch(RepeatedOrder(repeats=True), sharded(512, 4, 4, reshuffle=False), 96)
    assert {one.severity for one in found} == {Severity.NOTE}


def test_a_fault_that_begins_after_a_test_with_few_batches_becomes_a_warning():
    detector = RepeatedOrder()
    watch(detector, sharded(48, 4, 4, reshuffle=False), 60)
    found = watch(detector, sharded(512, 4, 4, reshuffle=False), 96, first=60)
    assert found[-1].severity is Severity.WARNING
    assert found[-1].numbers["period"] == 32


@pytest.mark.parametrize("cut", [10, 33, 40, 64])
def test_a_saved_state_changes_nothing(cut):
    batches = list(islice(sharded(512, 4, 4, reshuffle=False), 90))
    whole = watch(RepeatedOrder(), iter(batches), 90)
    first, second = RepeatedOrder(), RepeatedOrder()
    memory = RecentBatches(4)
    found = watch(first, iter(batches), cut, memory=memory)
    second.restore(unpack_state(pack_state(first.state())))
    found += watch(second, iter(batches[cut:]), 90, first=cut, memory=again(memory))
    assert found == whole


def again(memory):
    """Return the memory of batches as a restarted job gets it."""
    copy = RecentBatches(4)
    copy.restore(unpack_state(pack_state(memory.state())))
    return copy


def test_steps_that_an_older_checkpoint_repeats_are_silent():
    batches = list(islice(sharded(4096, 4, 4), 200))
    detector, again = RepeatedOrder(), RepeatedOrder()
    assert watch(detector, iter(batches), 120) == []
    detector.close()
    again.restore(unpack_state(pack_state(detector.state())))
    assert watch(again, iter(batches[80:]), 120, first=120) == []


def test_the_fault_is_found_after_a_restart_too():
    detector = RepeatedOrder()
    batches = list(islice(sharded(512, 4, 4, reshuffle=False), 120))
    watch(detector, iter(batches), 20)
    detector.close()
    found = watch(detector, iter(batches[20:]), 100, first=20)
    assert found[0].first_step == 20 + 32


def test_steps_beyond_the_memory_are_forgotten_and_nothing_else():
    finder, memory = PeriodFinder(), RecentBatches(1, generation=50)

    def observe(step, batch):
        [recurrence] = memory.observe(np.array([[batch]]), [step])
        finder.observe(step, recurrence.before)

    runs = []
    for step in range(400):
        observe(step, step % 120)
        runs.append(finder.run)
    assert max(runs) == 0  # at least 50 and at most 100 steps are remembered
    for step in range(400, 600):
        observe(step, 1000 + step % 40)
    assert (finder.period, finder.run) == (40, 160)

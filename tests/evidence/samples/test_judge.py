"""Batches of other numbers, the same batches again and again, and runs in which that is healthy."""

from itertools import islice

import numpy as np
import pytest

from rankscope.bus.finding import Severity
from rankscope.bus.plan import Plan
from rankscope.evidence.samples.judge import Samples
from rankscope.stats.arrays import Ragged
from support.stepping import findings_of
from support.streams import gathered, sharded

NO_SAMPLES = np.empty(0, np.int64)


def told_of_counts(counts_of, steps, width=4):
    without = [NO_SAMPLES] * width
    given = (gathered(t, without, micro_batches=counts_of(t)) for t in range(steps))
    return findings_of("data.micro_batches", given)


def test_one_of_fewer_micro_batches_is_named_since_its_beginning_until_its_end():
    def counts(step):
        epoch_end = step % 10 == 9
        if epoch_end:
            return [2, 2, 2, 1]
        return [4, 4, 3 if 30 <= step < 100 else 4, 4]

    told = told_of_counts(counts, 160)
    assert {(one.severity, one.ranks, one.first_step) for one in told} == {
        (Severity.WARNING, (2,), 30)
    }
    assert told[0].step - 30 < 45
    assert "since step 30: 3 on rank 2, 4 on the others" in told[0].explanation
    assert [one.status for one in told][-2:] == ["open", "closed"]


def test_numbers_that_change_from_step_to_step_or_at_an_epochs_end_are_healthy():
    rng = np.random.default_rng(0)
    assert told_of_counts(lambda step: rng.integers(1, 3, 2), 200, 2) == []
    assert told_of_counts(lambda step: [4, 3] if step % 3 == 2 else [4, 4], 150, 2) == []


def test_of_two_workers_both_are_named_and_all_steps_are_counted():
    told = told_of_counts(lambda step: [4 if step < 20 else 2, 4], 80, 2)
    assert {one.ranks for one in told} == {(0, 1)}
    assert told[0].evidence["steps"] == told[0].step - 19


def told_of(stream, steps, width, plan=None):
    given = list(named(stream, steps, width))
    for one in given:
        none = Ragged.of([batch[:0] for batch in one.samples])
        sent = {"samples_B": Ragged.of(one.samples), "rows_B": none}
        Samples().combine(sent, one.workers)
    return findings_of("data.repeated_batches", given, plan)


def named(stream, steps, width, **columns):
    for step, batches in enumerate(islice(stream, steps)):
        yield gathered(step, batches, samples_named=[True] * width, **columns)


def repeating(width, few, begin=10, end=10**6):
    """Yield batches of a sharded job, in which the last worker meets ``few`` of its own again."""
    kept = []
    for step, batches in enumerate(sharded(10**5, width, 4)):
        if begin <= step < end:
            kept += [batches[-1]] if len(kept) < few else []
            batches[-1] = kept[step % len(kept)]
        yield batches


@pytest.mark.parametrize(("width", "few"), [(2, 3), (4, 12)])
def test_a_worker_that_goes_through_few_batches_is_named_until_it_goes_on(width, few):
    told = told_of(repeating(width, few, end=90), 120, width)
    assert {(one.severity, one.ranks) for one in told} == {(Severity.WARNING, (width - 1,))}
    assert told[0].step <= 10 + 2 * few + 24
    assert f"no more than {few} batch" in told[0].explanation
    assert told[-1].status == "closed"


def test_where_the_plan_has_repeats_it_is_a_note():
    told = told_of(repeating(4, 1), 60, 4, Plan(repeats=True))
    assert {one.severity for one in told} == {Severity.NOTE}


def test_epochs_of_a_small_data_set_and_uneven_shards_are_healthy():
    assert told_of(sharded(20, 2, 1), 150, 2) == []

    def uneven():  # each worker goes through a shard of its own; their sizes differ
        step = 0
        while True:
            yield [np.array([1000 * rank + step % (10 + rank)]) for rank in range(2)]
            step += 1

    assert told_of(uneven(), 150, 2) == []


def filled(width, fillers, size=8):
    """Yield batches of a sharded job; in some steps rank 1 has one sample throughout."""
    for step, batches in enumerate(sharded(10**5, width, size)):
        if step in fillers:
            batches[1] = np.full(size, fillers[step])
        yield batches


def of_filled(stream, steps, width, **columns):
    return findings_of("data.filled_batches", named(stream, steps, width, **columns))


def test_a_batch_of_one_sample_is_a_note_and_the_second_by_it_a_warning():
    told = of_filled(filled(2, {20: -5, 50: -5}), 80, 2)
    severities = [(one.step, one.severity) for one in told]
    assert severities == [(20, Severity.NOTE), (50, Severity.WARNING)]
    assert told[-1].ranks == (1,)
    assert "Rank 1 met 2 batches that held one sample only" in told[-1].explanation


def test_inputs_that_are_always_the_same_are_the_training_s_own():
    assert of_filled(([np.zeros(8, int)] * 2 for _ in range(100)), 100, 2) == []


def test_batches_without_labels_and_small_ones_say_nothing():
    weights = [64.0, 0.0]
    assert of_filled(filled(2, {20: -5, 50: -5}), 80, 2, loss_weight=weights) == []
    assert of_filled(filled(2, {20: -5, 50: -5}, size=3), 80, 2) == []


def test_processes_of_a_loader_that_read_the_whole_stream():
    given = (
        gathered(step, [[], []], loader_repeats=[step % 2 if step < 24 else 0] * 2)
        for step in range(40)
    )
    found = findings_of("data.repeated_batches", given)
    assert {(one.id, one.severity, one.ranks) for one in found} == {
        ("loader-processes", Severity.WARNING, (0, 1))
    }
    assert "each process reads the whole stream" in found[0].explanation
    assert found[0].step == 15

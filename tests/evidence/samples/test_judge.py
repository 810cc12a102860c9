from itertools import islice

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.finding import Severity
from rankscope.bus.messages import Layout
from rankscope.bus.plan import Plan
from rankscope.bus.step import StepReport
from rankscope.evidence.samples.duplicates import DuplicateBatches
from rankscope.evidence.samples.judge import Samples
from rankscope.evidence.samples.orders import RepeatedOrder
from rankscope.evidence.samples.repeats import StaleSamples
from rankscope.record.states import pack_state, unpack_state
from rankscope.stats.arrays import MISSING_INT, Ragged
from support.stepping import describe, evidence_of, findings_of
from support.streams import accumulated, gathered, sharded, with_replacement


def told_of_counts(counts_of, steps, width=4):
    without = [[]] * width
    given = (gathered(t, without, micro_batches=counts_of(t)) for t in range(steps))
    return findings_of("data.micro_batches", given)


def test_one_of_fewer_micro_batches_is_named_since_its_beginning_until_its_end():
    def counts(step):
        if step % 10 == 9:
            return [2, 2, 2, 1]
        return [4, 4, 3 if 30 <= step < 100 else 4, 4]

    told = told_of_counts(counts, 160)
    since = {(one.severity, one.ranks, one.first_step) for one in told}
    assert since == {(Severity.WARNING, (2,), 30)}
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


def told_of_sides(left_of, steps, width=4):
    without = [[]] * width
    given = (gathered(t, without, padded_left=left_of(t)) for t in range(steps))
    return findings_of("data.padding_side", given)


def test_a_worker_that_pads_on_the_other_side_is_named_until_its_end():
    def left(step):
        if step % 5 == 0:  # nobody pads, or one does not: no step to compare
            return [np.nan, 0.0, 1.0, 0.0]
        return [0.0, 0.0, 1.0 if step < 60 else 0.0, 0.0]

    told = told_of_sides(left, 80)
    assert {(one.severity, one.ranks, one.first_step) for one in told} == {
        (Severity.WARNING, (2,), 1)
    }
    assert "The attention masks of rank 2 pad every sample on the left" in told[0].explanation
    assert told[0].evidence["steps"] == 24
    assert [one.status for one in told][-2:] == ["open", "closed"]


def test_of_two_workers_that_pad_apart_the_left_one_is_said_in_a_note():
    [told, *_] = told_of_sides(lambda step: [1.0, 0.0], 30, 2)
    assert (told.severity, told.ranks) == (Severity.NOTE, (0, 1))
    assert "masks of rank 0 pad" in told.explanation


def test_sides_that_are_mixed_or_alike_are_healthy():
    assert told_of_sides(lambda step: [0.5, 0.0, 1.0, 0.0], 60) == []
    assert told_of_sides(lambda step: [1.0] * 4, 60) == []
    assert told_of_sides(lambda step: [float(step % 2), 0.0, 0.0, 0.0], 60) == []


def told_of(stream, steps, width, plan=None):
    given = list(named(stream, steps, width))
    for one in given:
        none = Ragged.of([batch[:0] for batch in one.samples])
        Samples(Layout(2)).combine(
            {"samples_B": Ragged.of(one.samples), "rows_B": none}, one.workers
        )
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
    assert of_filled(filled(2, {20: -5, 50: -5}), 80, 2, loss_weight=[64.0, 0.0]) == []
    assert of_filled(filled(2, {20: -5, 50: -5}, size=3), 80, 2) == []


def test_processes_of_a_loader_that_read_the_whole_stream():
    repeats = [0, 1] * 12 + [0] * 16
    given = (gathered(step, [[], []], loader_repeats=[n] * 2) for step, n in enumerate(repeats))
    found = findings_of("data.repeated_batches", given)
    kinds = {(one.id, one.severity, one.ranks) for one in found}
    assert kinds == {("loader-processes", Severity.WARNING, (0, 1))}
    assert "each process reads the whole stream" in found[0].explanation
    assert found[0].step == 15


PAIRS = [0, 0, 1, 1]
LOSSES = [2.0, 2.0, 1.5, 1.5]
NORMS = [1.0, 1.3, 0.9, 0.7]


def found(num_steps=4, batches=PAIRS, by_loop=False, **columns):
    columns = {"loss": LOSSES, "grad_norm": NORMS, **columns}
    detector = DuplicateBatches(4, by_loop=by_loop)
    for step in range(num_steps):
        samples = [np.arange(4) + 1000 * step + 100 * number for number in batches]
        values = {n: value(step) if callable(value) else value for n, value in columns.items()}
        evidence = evidence_of(detector, StepReport(gathered(step, samples, **values), {}))
    return evidence


def test_workers_that_share_the_work_on_each_sample_are_no_duplicates():
    assert found() == []
    assert found(grad_norm=lambda step: [np.nan] * 4 if step else NORMS) == []


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
    ("columns", "sure"),
    [
        ({}, False),
        ({"loss": [2.0] * 4}, True),
        ({"loss": [np.nan] * 4}, True),
        ({"rows_digest": [7] * 4}, True),  # rows of the data set
    ],
)
def test_numbers_that_repeat_within_a_batch_are_no_identity_where_losses_differ(columns, sure):
    """The graph of each node is one: it is the same in all batches of as many nodes."""
    detector = DuplicateBatches(4)
    given = {"loss": [2.0, 2.1, 1.5, 1.6], "grad_norm": [1.0] * 4, **columns}
    for step in range(4):
        samples = [np.arange(16) // 4] * 4
        evidence = evidence_of(detector, StepReport(gathered(step, samples, **given), {}))
    assert [one.cause for one in evidence] == ["data.duplicate_batches"] * sure


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


def watch_order(detector, stream, num_steps, first=0):
    reports = []
    for step, batches in enumerate(islice(stream, num_steps), start=first):
        sets = [frozenset(batch.tolist()) for batch in batches]
        digests = [hash(own) if own else MISSING_INT for own in sets]
        reports.append(summarize(gathered(step, batches, batch_digest=digests)))
    found = evidence_of(detector, *reports)
    assert all(map(describe, found))
    return found


@pytest.mark.parametrize(("stale", "ranks"), [({1}, (1,)), ({0, 1, 2, 3}, None), ((), None)])
def test_a_worker_that_alone_trains_again_on_its_last_batch_is_named(stale, ranks):
    def stream():
        before = [np.empty(0, np.int64)] * 4
        for step, batches in enumerate(sharded(4096, 4, 8)):
            again = step % 5 == 4  # a part of the batch before it
            now = [
                np.concatenate([before[rank][:4], batch]) if again and rank in stale else batch
                for rank, batch in enumerate(batches)
            ]
            yield now
            before = now

    found = watch_order(StaleSamples(4), stream(), 80)
    assert {one.ranks for one in found} == ({ranks} if ranks else set())
    assert all("4 samples" in words and "never did" in words for words, _ in map(describe, found))


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

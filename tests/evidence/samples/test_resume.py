from dataclasses import replace
from itertools import chain, count, islice

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.finding import Severity
from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.bus.steps import StepBatch
from rankscope.evidence.samples.epochs import KEY, EpochsCutShort
from rankscope.evidence.samples.resume import ResumeMismatch
from rankscope.record.states import pack_state, unpack_state
from support.stepping import describe, evidence_of, words
from support.streams import gathered, replicated, shard, sharded, with_replacement

W, BATCH = 4, 4


def feed(detector, reports, together):
    found = [
        evidence
        for start in range(0, len(reports), together)
        for told in detector.observe(StepBatch(reports[start : start + together]))
        for evidence in told
    ]
    assert not any("{" in text for evidence in found for text in describe(evidence))
    return found


def goes_on(before, after, *options, together):
    old, new = (ResumeMismatch(W, *options) for _ in range(2))
    assert feed(old, before, together) == []
    assert old.close() == ()
    new.restore(unpack_state(pack_state(old.state())))
    return feed(new, after, together)


def restart(before, after, *, lr=(None, None), capacity=1 << 18, together=1, rows=None):
    def reports(batches, first, rate):
        for step, samples in enumerate(batches, start=first):
            columns = {} if rate is None else {"lr": [rate(step)] * len(samples)}
            yield summarize(gathered(step, samples, **columns))

    before = list(reports(before, 0, lr[0]))
    after = list(reports(after, len(before), lr[1]))
    return goes_on(before, after, capacity, rows, together=together)


def epochs(num_samples, first_epoch=0, **kwargs):
    for epoch in count(first_epoch):
        shares = [shard(num_samples, W, rank, 0, epoch, **kwargs) for rank in range(W)]
        for start in range(0, len(shares[0]), BATCH):
            yield [share[start : start + BATCH] for share in shares]


def shuffled_again(num_samples, steps, seed=7):
    """Yield the rest of an epoch as another permutation would leave it, then new epochs."""
    shares = [shard(num_samples, W, rank, seed, 0) for rank in range(W)]
    rest = (
        [share[start : start + BATCH] for share in shares]
        for start in range(steps * BATCH, len(shares[0]), BATCH)
    )
    return chain(rest, epochs(num_samples, 50))


@pytest.mark.parametrize(
    ("num_samples", "stop", "epoch", "together"),
    [(512, 16, 0, 1), (512, 16, 3, 5), (512, 29, 0, 5), (1001, 31, 1, 1)],
)
def test_another_permutation_after_the_restart_is_an_error(epoch, num_samples, stop, together):
    length = -(-num_samples // (W * BATCH))
    at = epoch * length + stop
    after = islice(shuffled_again(num_samples, stop), 2 * length)
    found = restart(islice(epochs(num_samples), at), after, together=together)
    assert found
    kinds = {(one.cause, one.severity, one.key) for one in found}
    assert kinds == {("data.resume_mismatch", Severity.ERROR, "")}
    assert (found[0].ranks, found[0].first_step) == (tuple(range(W)), at)
    assert found[0].numbers["epoch_began_at"] == epoch * length
    assert found[0].last_step < at + length


def test_one_worker_that_shuffles_again_is_named():
    def after():
        good = islice(epochs(1024), 32, None)
        for batches, odd in zip(good, shuffled_again(1024, 32), strict=False):
            yield [*batches[:2], odd[2], batches[3]]

    assert restart(islice(epochs(1024), 32), islice(after(), 32))[-1].ranks == (2,)


@pytest.mark.parametrize(("size", "at"), [(512, 7), (512, 32), (517, 16), (16, 33), (40, 1)])
def test_a_job_that_goes_on_is_silent(size, at):
    stream = epochs(size)
    assert restart(islice(stream, at), islice(stream, at % 2, 120)) == []


@pytest.mark.parametrize(
    ("at", "back"), [(20, 5), (45, 6), (38, 10), (33, 3), (70, 14)]
)  # the last three from before the epoch
def test_an_older_checkpoint_is_a_note(at, back):
    batches = list(islice(epochs(512), 150))
    (note,) = restart(batches[:at], batches[at - back :])
    assert (note.severity, note.key) == (Severity.NOTE, "steps-done-twice")
    words, _ = describe(note)
    assert f"steps {at - back} to {at - 1} came again" in words


def test_the_epoch_from_its_beginning_is_a_warning_while_the_learning_rate_tells_nothing():
    batches = list(islice(epochs(512), 100))
    (found,) = restart(batches[:20], batches)
    assert (found.severity, found.key) == (Severity.WARNING, "epoch-begun-again")
    assert found.numbers["repeats_steps_from"] == 0


@pytest.mark.parametrize(("rows", "steps", "seen"), [(2000, 8, 1), (600, 8, 0), (2000, 3, 0)])
def test_a_few_steps_show_a_loader_that_began_again_where_most_rows_are_left(rows, steps, seen):
    batches = list(islice(epochs(2000), 100))
    found = restart(batches[:20], batches[:steps], rows=rows, lr=(falls(), falls()))
    begun_again = (Severity.WARNING, "epoch-begun-again")
    assert [(one.severity, one.key) for one in found] == [begun_again] * seen
    assert restart(batches[:20], batches[20:28], rows=rows) == []


def falls(back=0):
    return lambda step: 1e-3 * (1 - (step - back) / 1000)


def test_a_loader_that_was_not_advanced_is_an_error_when_the_schedule_went_on():
    batches = list(islice(epochs(512), 100))
    (found,) = restart(batches[:20], batches, lr=(falls(), falls()))
    assert (found.severity, found.key) == (Severity.ERROR, "epoch-begun-again")


def test_a_job_that_went_back_as_a_whole_is_a_note():
    batches = list(islice(epochs(512), 100))
    (found,) = restart(batches[:20], batches, lr=(falls(), falls(20)))
    assert (found.severity, found.key) == (Severity.NOTE, "steps-done-twice")


STARTED, SAVED = StateKind.STARTED, StateKind.SAVED


def held(step, kind, model, **more):
    rows = (
        StateDifference(kind, f"optimizer: {name}", np.full(W, value), np.zeros(W, bool))
        for name, value in {"parameters: bits": model, **more}.items()
    )
    return replace(step, differences=(*step.differences, *rows))


def streamed(before, after, *, saved, started, state=None, more=True, together=3):
    """Return the evidence of a job that begins again with the model of step ``started``.

    ``state`` is that of its optimizer, which had none at first; ``more``: its data had a rest.
    """
    steps = [
        gathered(number, samples, loader_goes_on=[more or number != len(before) - 1] * W)
        for number, samples in enumerate([*before, *after])
    ]
    for number in saved:
        steps[number] = held(steps[number], SAVED, number)
    steps[0] = held(steps[0], STARTED, -2)
    steps[len(before)] = held(steps[len(before)], STARTED, started, **(state or {}))
    reports = [summarize(step) for step in steps]
    return goes_on(reports[: len(before)], reports[len(before) :], together=together)


@pytest.mark.parametrize(
    ("started", "state", "severity"),
    [
        (-1, {}, Severity.WARNING),  # another seed, perhaps
        (15, {}, Severity.ERROR),
        (-1, {"step: highest": 16}, Severity.ERROR),
        (-1, {"momentum_buffer: held": 2}, Severity.ERROR),
    ],
)
def test_another_permutation_is_no_error_in_another_training(started, state, severity):
    before, after = (list(islice(them, 32)) for them in (epochs(512), shuffled_again(512, 16)))
    found = streamed(before[:16], after, saved=[15], started=started, state=state)
    assert found
    assert {(one.severity, one.key) for one in found} == {(severity, "")}
    assert ("it may be another training" in describe(found[0])[0]) is (severity < Severity.ERROR)


@pytest.mark.parametrize("together", [1, 5])
@pytest.mark.parametrize(("saved", "started"), [([37], 37), ([30, 37], 37), ([10, 30], 30)])
def test_a_stream_that_begins_again_behind_its_model_is_a_warning(saved, started, together):
    batches = list(islice(epochs(2000), 38))
    [found] = streamed(batches, batches, saved=saved, started=started, together=together)
    assert (found.severity, found.key) == (Severity.WARNING, "epoch-begun-again")
    text, advice = describe(found)
    assert f"went on from step {started}, bit for bit" in text
    assert advice.startswith("Restore the state")
    assert found.last_step < 38 + 8


@pytest.mark.parametrize(
    ("first", "started", "more"),
    [
        (0, 37, False),  # the data had ended
        (0, -1, True),  # nobody knows these parameters
        (31, 30, True),  # steps after the checkpoint come again
        (38, 37, True),
    ],
)
def test_a_stream_that_begins_again_or_goes_on_by_right_is_silent(first, started, more):
    batches = list(islice(epochs(2000), 60))
    after = batches[first:][:12]
    found = streamed(batches[:38], after, saved=[30, 37], started=started, more=more)
    assert [one for one in found if one.severity > Severity.NOTE] == []


def test_a_stream_that_goes_back_with_its_model_to_the_epochs_start_is_a_note():
    batches = list(islice(epochs(640), 100))
    [found] = streamed(batches[:60], batches[40:], saved=[39, 59], started=39)
    assert (found.severity, found.key) == (Severity.NOTE, "steps-done-twice")


def test_a_loader_that_went_further_back_than_its_checkpoint_is_a_warning():
    batches = list(islice(epochs(2000), 60))
    [found] = streamed(batches[:38], batches[28:], saved=[30], started=30)
    assert (found.severity, found.key) == (Severity.WARNING, "loader-behind-model")
    assert "the parameters are those after step 30, bit for bit" in describe(found)[0]


@pytest.mark.parametrize(("stop", "seen"), [(50, 1), (64, 0), (96, 0)])
def test_the_same_order_in_each_epoch_is_no_restart_at_an_epochs_end(stop, seen):
    stream = list(islice(sharded(512, W, BATCH, reshuffle=False), 200))
    first = stop // 32 * 32
    after, at = stream[first:][:12], stop - 1
    found = streamed(stream[:stop], after, saved=[at], started=at, more=False)
    begun_again = (Severity.WARNING, "epoch-begun-again")
    assert [(one.severity, one.key) for one in found] == [begun_again] * seen


def test_a_large_epoch_is_followed_in_a_share_of_its_samples():
    n, stop = 10_000, 300
    found = restart(islice(epochs(n), stop), islice(shuffled_again(n, stop), 300), capacity=1 << 10)
    assert found[0].severity is Severity.ERROR
    assert found[0].numbers["follows_one_sample_in"] == 8
    assert "one in 8" in describe(found[0])[0]


UNKNOWN = [[np.empty(0, np.int64)] * W] * 20
HEALTHY = {
    "an epoch's end": (lambda: sharded(512, W, BATCH), 64, 100, 1 << 18),
    "the same order": (lambda: sharded(512, W, BATCH, reshuffle=False), 32, 100, 1 << 18),
    "with replacement": (lambda: with_replacement(600, W, BATCH, 0), 5, 150, 1 << 18),
    "with replacement, later": (lambda: with_replacement(600, W, BATCH, 1), 60, 150, 1 << 18),
    "each shuffles everything": (lambda: replicated(600, BATCH, range(W)), 20, 150, 1 << 18),
    "unknown before": (lambda: chain(UNKNOWN, epochs(400)), 20, 60, 1 << 18),
    "a large epoch": (lambda: epochs(10_000), 630, 1000, 1 << 10),
    "more and more": (lambda: with_replacement(600_000, W, 64, 2), 80, 300, 1 << 14),
}
"""Streams, where they are cut, how many of their steps are shown, and what is remembered."""


@pytest.mark.parametrize("name", HEALTHY)
def test_what_goes_on_as_it_was_is_silent(name):
    make, at, until, capacity = HEALTHY[name]
    stream = make()
    assert restart(islice(stream, at), islice(stream, until), capacity=capacity) == []


WORKERS, SAMPLES = 2, 8
GLOBAL = WORKERS * SAMPLES


def whole_epochs(size, first=0, begin=0, *, shuffled=True, every=False):
    for epoch in count(first):
        order = np.random.default_rng(epoch).permutation(size) if shuffled else np.arange(size)
        batches = order[: size // GLOBAL * GLOBAL].reshape(-1, WORKERS, SAMPLES)
        yield from batches[begin if every or epoch == first else 0 :]


def restarted(before, after, capacity=1 << 16, **options):
    old, new = (EpochsCutShort(capacity=capacity, **options) for _ in range(2))
    for number, samples in enumerate(before):
        assert evidence_of(old, summarize(gathered(number, list(samples)))) == []
    old.close()
    new.restore(unpack_state(pack_state(old.state())))
    steps = enumerate(after, len(before))
    return [e for n, batch in steps for e in evidence_of(new, summarize(gathered(n, list(batch))))]


@pytest.mark.parametrize(("size", "capacity"), [(80, 1 << 16), (1280, 300)])
@pytest.mark.parametrize("shuffled", [True, False])
def test_epochs_that_begin_at_the_place_of_the_restart_are_a_warning(size, capacity, shuffled):
    length = size // GLOBAL
    begin = 2 * length // 5
    stop = 4 * length + begin
    before = list(islice(whole_epochs(size, shuffled=shuffled), stop))
    after = whole_epochs(size, 4, begin, shuffled=shuffled, every=True)
    [found] = restarted(before, islice(after, 9 * length), capacity)
    assert (found.cause, found.key) == ("data.resume_mismatch", KEY)
    assert (found.severity, found.first_step) == (Severity.WARNING, stop)
    assert f"Before the restart at step {stop}" in words(found)
    assert found.numbers["samples"] == pytest.approx(size, rel=0.2)


def other_data(size):
    return whole_epochs(size, 77), (batch + 10**6 for batch in whole_epochs(size, 78))


AS_BEFORE = {
    "whole epochs": lambda: (whole_epochs(80), whole_epochs(80, 4, 2)),
    "with a rest that is left out": lambda: (whole_epochs(95), whole_epochs(95, 4, 2)),
    "epochs of one batch": lambda: (whole_epochs(28), whole_epochs(28, 22, 0)),
    "padded shards": lambda: (
        sharded(75, WORKERS, SAMPLES),
        islice(sharded(75, WORKERS, SAMPLES), 22, None),
    ),
    "with replacement": lambda: (with_replacement(80, WORKERS, SAMPLES, 0),) * 2,
    "other data": lambda: other_data(80),
    "the last steps again": lambda: (whole_epochs(80), islice(whole_epochs(80), 18, None)),
}


@pytest.mark.parametrize("name", AS_BEFORE)
def test_what_goes_on_as_before_is_silent(name):
    before, after = AS_BEFORE[name]()
    before = list(islice(before, 22))
    assert restarted(before, islice(after, 150)) == []


def test_a_few_epochs_before_the_restart_and_repeats_on_purpose_show_nothing():
    short = list(islice(whole_epochs(80), 8))
    rest = list(islice(whole_epochs(80, 1, 3, every=True), 60))
    assert restarted(short, rest) == []
    assert restarted(list(islice(whole_epochs(80), 22)), rest, repeats=True) == []
    assert restarted(list(islice(whole_epochs(80), 22)), chain(rest)) != []

"""Overlapping shards in epochs of more samples than the ledger remembers."""

import numpy as np
import pytest

from rankscope.bus.finding import Severity
from rankscope.evidence.samples.overlap import OverlappingShards, _chance, _ShareTest
from rankscope.record.states import pack_state, unpack_state
from support.stepping import describe, evidence_of
from support.streams import replicated, reports, shard, sharded, with_replacement

W = 8


def watch(stream, num_steps, capacity=512, cut=None):
    detector, found = OverlappingShards(W, capacity), []
    for report in reports(stream, num_steps):
        if report.step == cut:
            state = unpack_state(pack_state(detector.state()))
            detector = OverlappingShards(W, capacity)
            detector.restore(state)
        found += evidence_of(detector, report)
    return found


def observed(stream, num_steps, num_workers, *, named=True, **options):
    detector = OverlappingShards(num_workers, **options)
    steps = reports(stream, num_steps, named=named)
    return [one for step in steps for one in evidence_of(detector, step)]


FAULTY = {
    "each shuffles": lambda: replicated(8000, 4, range(W)),
    "seeds by rank": lambda: sharded(8000, W, 4, seeds=list(range(W))),
}


@pytest.mark.parametrize("name", FAULTY)
def test_overlaps_are_found_in_a_share_of_the_samples(name):
    last = watch(FAULTY[name](), 250)[-1]
    assert last.severity is Severity.ERROR
    assert last.ranks == tuple(range(W))
    assert last.numbers["follows_one_sample_in"] in (8, 16)
    words, _ = describe(last)
    assert f"among the one in {last.numbers['follows_one_sample_in']} samples" in words


@pytest.mark.parametrize(
    ("seeds", "advice"),
    [
        ((), "Check that all ranks split and shuffle the data with the same seed"),
        (
            [3] * 8,
            "All samplers shuffle with seed 3. See that each gets the same epoch in set_epoch",
        ),
        (range(8), "The samplers shuffle with seeds 0, 1, 2, 3, 4, 5, 6, 7: give all ranks one"),
    ],
)
def test_advice_fits_what_is_known_of_the_samplers(seeds, advice):
    found = observed(FAULTY["seeds by rank"](), 60, W, seeds=tuple(seeds))
    _, check = describe(found[-1])
    assert check.startswith(advice)


@pytest.mark.parametrize(("size", "drop_last"), [(3000, False), (8003, True)])
def test_healthy_epochs_of_many_samples_are_silent(size, drop_last):
    stream = sharded(size, W, 4, drop_last=drop_last, loader_drop_last=drop_last)
    assert watch(stream, 700) == []


def test_sampling_with_replacement_is_no_error_in_a_share_either():
    found = watch(with_replacement(8000, W, 4), 500)
    assert found
    assert {one.severity for one in found} <= {Severity.NOTE, Severity.WARNING}
    assert found[-1].severity is Severity.NOTE


def drawn_by(rank, batch_size):
    """Yield the batches of one of four workers; its epochs end when its own shard does."""
    for epoch in range(100):
        own = shard(960, 4, rank, 0, epoch)
        yield from (own[at : at + batch_size] for at in range(0, len(own), batch_size))


def test_a_worker_whose_epochs_end_at_other_steps_overlaps_with_nobody():
    stream = (
        list(batches) for batches in zip(*map(drawn_by, range(4), [4, 3, 4, 4]), strict=False)
    )
    assert observed(stream, 300, 4) == []


def one_step_late(batch):
    """Yield batches of two workers: the second draws what the first draws a step later."""
    for step in range(100):
        yield [np.arange(batch) + batch * (step + rank) for rank in range(2)]


def neighbours(batch):
    """Yield batches of a file in its order, where each content stands twice in a row."""
    for step in range(100):
        first = 2 * batch * step + 1
        yield [(first + batch * rank + np.arange(batch)) // 2 for rank in range(2)]


@pytest.mark.parametrize(
    ("stream", "severity"), [(one_step_late(4), Severity.ERROR), (neighbours(4), Severity.NOTE)]
)
def test_a_whole_batch_that_comes_a_step_late_is_no_equal_content_side_by_side(stream, severity):
    assert observed(stream, 40, 2, named=False)[-1].severity is severity


def filled_up(num_workers, *, every_step=False):
    """Yield new samples for each step, whose number is drawn, and copies of the first ones.

    With them, all workers have equally many.
    """
    rng = np.random.default_rng(0)
    first = 0
    while True:
        num_rows = 8 * num_workers + (1 if every_step else rng.integers(num_workers))
        rows = first + np.arange(num_rows)
        first += num_rows
        rows = np.concatenate([rows, rows[: -num_rows % num_workers]])
        yield np.split(rows, num_workers)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("num_workers", [2, 4, 8])
def test_batches_that_are_filled_up_are_a_note_from_the_first_step_on(num_workers, named):
    found = observed(filled_up(num_workers), 80, num_workers, named=named)
    assert {one.severity for one in found} == {Severity.NOTE}
    words, _ = describe(found[-1])
    assert "Copies that fill up a batch, so that all workers have equally many samples" in words


def test_copies_in_every_step_are_more_than_a_note():
    assert observed(filled_up(4, every_step=True), 80, 4)[-1].severity is Severity.ERROR


def padded_by(rank, num_workers, size, batch):
    """Yield batches of a healthy job, in which one worker's samples are other ones in each epoch.

    Its collate function pads them to the longest sample of their batch with a value of its own.
    """
    for epoch in range(20):
        shards = [shard(size, num_workers, worker, 0, epoch) for worker in range(num_workers)]
        shards[rank] = shards[rank] + size * (epoch + 1)
        for at in range(0, len(shards[0]), batch):
            yield [own[at : at + batch] for own in shards]


@pytest.mark.parametrize(
    ("rows", "named", "severity"),
    [(None, False, Severity.ERROR), (960, False, Severity.NOTE), (960, True, Severity.ERROR)],
)
def test_rows_that_become_other_samples_in_each_epoch_prove_nothing(rows, named, severity):
    found = observed(padded_by(1, 3, 960, 8), 100, 3, named=named, rows=rows)
    assert found[-1].severity is severity
    words, check = describe(found[-1])
    assert ("more different samples than the data set has rows" in words) is (
        severity is Severity.NOTE
    )
    assert check.startswith("Samples are compared by their ids") is (severity is Severity.NOTE)


def smallest_chance(rng, p, num_repeats):
    """Toss repeats one by one and return the smallest chance that was ever stated."""
    test, smallest = _ShareTest(), 1.0
    for own in rng.random(num_repeats) < p:
        test.add(int(not own), int(own), p)
        smallest = min(smallest, _chance(test.log_ratio))
    return smallest


def test_innocent_repeats_seldom_look_guilty_however_often_one_looks():
    level = 0.2
    rng = np.random.default_rng(11)
    calls = sum(smallest_chance(rng, 0.125, 150) <= level for _ in range(300))
    assert calls / 300 <= level + 3 * np.sqrt(level * (1 - level) / 300)


def test_a_few_own_repeats_delay_certainty_but_do_not_prevent_it():
    test = _ShareTest()
    test.add(0, 3, 0.125)
    assert _chance(test.log_ratio) == 1.0
    test.add(300, 0, 0.125)
    assert _chance(test.log_ratio) < 1e-3

"""Overlapping shards in epochs of more samples than the ledger remembers."""

from itertools import islice

import numpy as np
import pytest

from rankscope.bus.finding import Severity
from rankscope.evidence.samples.overlap import OverlappingShards
from rankscope.evidence.samples.repeats import KEY
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
        ([3, None] * 4, "Check that all ranks split and shuffle the data with the same seed"),
        ([3] * 8, "All samplers shuffle with seed 3, so look elsewhere: a split before them"),
        (range(8), "The samplers shuffle with seeds 0, 1, 2, 3, 4, 5, 6, 7: give all ranks one"),
    ],
)
def test_advice_fits_what_is_known_of_the_samplers(seeds, advice):
    detector, found = OverlappingShards(W, seeds=tuple(seeds)), []
    for report in reports(FAULTY["seeds by rank"](), 60):
        found += evidence_of(detector, report)
    _, check = describe(found[-1])
    assert check.startswith(advice)


def test_one_seed_that_differs_is_named_in_a_share_of_the_samples():
    stream = sharded(20_000, W, 4, seeds=[0, 0, 1, 0, 0, 0, 0, 0])
    last = watch(stream, 620, capacity=2048)[-1]
    assert (last.severity, last.ranks) == (Severity.ERROR, (2,))


def test_numbers_of_samples_are_scaled_with_their_error():
    last = watch(FAULTY["seeds by rank"](), 250)[-1]
    drawn = list(islice(FAULTY["seeds by rank"](), last.last_step + 1))
    true = len({int(sample) for batches in drawn for batch in batches for sample in batch})
    numbers = last.numbers
    assert numbers["samples_drawn"] == sum(len(b) for batches in drawn for b in batches)
    assert abs(numbers["samples_distinct"] - true) <= 4 * numbers["samples_distinct_error"]
    assert 0 < numbers["samples_distinct_error"] < 0.1 * true


@pytest.mark.parametrize("size", [3000, 8001, 8003])
@pytest.mark.parametrize("drop_last", [False, True])
def test_healthy_epochs_of_many_samples_are_silent(size, drop_last):
    stream = sharded(size, W, 4, drop_last=drop_last, loader_drop_last=drop_last)
    assert watch(stream, 700) == []


def test_sampling_with_replacement_is_no_error_in_a_share_either():
    found = watch(with_replacement(8000, W, 4), 500)
    assert found
    assert {one.severity for one in found} <= {Severity.NOTE, Severity.WARNING}
    assert found[-1].severity is Severity.NOTE


def test_a_state_of_a_share_goes_on():
    whole = watch(FAULTY["seeds by rank"](), 160)
    assert watch(FAULTY["seeds by rank"](), 160, cut=100) == whole
    assert whole


@pytest.mark.parametrize(("size", "repeats"), [(1001, 7), (1007, 1), (1000, 0), (1004, 4)])
def test_padding_is_a_note_that_counts_the_samples(size, repeats):
    found = watch(sharded(size, W, 4), 80, capacity=1 << 20)
    assert [(one.key, one.severity, one.numbers["repeated"]) for one in found] == (
        [(KEY, Severity.NOTE, repeats)] if repeats else []
    )


def test_batches_that_are_filled_up_from_the_start_are_padding_too():
    def stream():
        for epoch in range(3):
            batches = list(islice(sharded(936, W, 4, seeds=[epoch] * W), 30))
            pairs = zip(batches[-1], batches[0], strict=True)
            yield from [*batches[:-1], [[*end, *start[:3]] for end, start in pairs]]

    (note,) = watch(stream(), 90, capacity=1 << 20)
    assert (note.key, note.numbers["repeated"], note.first_step) == (KEY, 24, 29)


def test_a_few_repeats_inside_an_epoch_are_no_padding():
    def stream():
        for step, batches in enumerate(sharded(4000, W, 4)):
            if step == 20:
                batches[3][0] = 1
            yield batches

    assert watch(stream(), 200, capacity=1 << 20) == []


def of_another_order(size, worker):
    """Yield the batches of workers one of which takes its shard of the data in another order."""
    order = np.random.default_rng(5).permutation(size)
    for batches in sharded(size, 4, 4):
        yield [order[b] if rank == worker else b for rank, b in enumerate(batches)]


def test_epochs_do_not_make_all_workers_of_one_whose_order_differs():
    stream = of_another_order(960, worker=2)
    found = observed(stream, 150, 4)
    assert (found[-1].severity, found[-1].ranks) == (Severity.ERROR, (2,))
    sure = [one for one in found if one.severity is Severity.ERROR]
    assert {one.ranks for one in sure} == {(2,)}


def repeats_inside_epochs(batches_T, epoch_steps):
    """Count draws of what only other workers drew before in the same epoch."""
    total = 0
    for start in range(0, len(batches_T), epoch_steps):
        owners: dict[int, set[int]] = {}
        for batches in batches_T[start : start + epoch_steps]:
            before = {sample: set(ranks) for sample, ranks in owners.items()}
            for rank, batch in enumerate(batches):
                for sample in set(batch.tolist()):
                    total += bool(before.get(sample)) and rank not in before[sample]
                    owners.setdefault(sample, set()).add(rank)
    return total


def test_the_next_epoch_of_data_that_hold_some_content_twice_is_not_counted():
    alias = np.arange(960)
    pairs = np.random.default_rng(7).choice(960, (12, 2), replace=False)
    alias[pairs[:, 0]] = pairs[:, 1]

    def stream():
        for batches in sharded(960, 4, 4):
            yield [alias[batch] for batch in batches]

    last = observed(stream(), 170, 4)[-1]
    true = repeats_inside_epochs(list(islice(stream(), last.last_step + 1)), 60)
    assert last.severity is Severity.NOTE
    assert true - 3 <= last.numbers["drawn_from_others"] <= true


def observed(stream, num_steps, num_workers):
    detector = OverlappingShards(num_workers)
    return [one for report in reports(stream, num_steps) for one in evidence_of(detector, report)]


def drawn_by(rank, batch_size):
    """Yield the batches of one of four workers; its epochs end when its own shard does."""
    for epoch in range(100):
        own = shard(960, 4, rank, 0, epoch)
        yield from (own[at : at + batch_size] for at in range(0, len(own), batch_size))


@pytest.mark.parametrize("size", [3, 5])
def test_a_worker_whose_epochs_end_at_other_steps_overlaps_with_nobody(size):
    stream = (
        list(batches) for batches in zip(*map(drawn_by, range(4), [4, size, 4, 4]), strict=False)
    )
    assert observed(stream, 300, 4) == []

from itertools import islice
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset

from rankscope.bus.finding import Severity
from rankscope.bus.step import StepReport
from rankscope.evidence.samples.judge import SHARDED_FIRST, EpochCoverage, SplitTwice
from rankscope.evidence.samples.overlap import OverlappingShards, _chance, _ShareTest
from rankscope.verdict.diagnosis import ranks_of_other_rows
from rankscope.wrappers.datasets import data_digest_of, length_of, order_of, rows_of, splits_of
from support.stepping import describe, evidence_of
from support.streams import gathered, replicated, reports, shard, sharded, with_replacement

W = 8


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
    last = observed(FAULTY[name](), 250, W, capacity=512)[-1]
    assert (last.severity, last.ranks) == (Severity.ERROR, tuple(range(W)))
    assert last.numbers["follows_one_sample_in"] in (8, 16)
    words, _ = describe(last)
    assert f"among the one in {last.numbers['follows_one_sample_in']} samples" in words


@pytest.mark.parametrize(
    ("seeds", "advice"),
    [
        ((), "Check that all ranks split and shuffle the data with the same seed"),
        ([3] * 8, "All samplers shuffle with seed 3. See that each gets the same epoch"),
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
    assert observed(stream, 700, W, capacity=512) == []


def test_sampling_with_replacement_is_no_error_in_a_share_either():
    found = observed(with_replacement(8000, W, 4), 500, W, capacity=512)
    assert found
    assert {one.severity for one in found} <= {Severity.NOTE, Severity.WARNING}
    assert found[-1].severity is Severity.NOTE


def drawn_by(rank, batch_size):
    """Yield the batches of one of four workers; its epochs end when its own shard does."""
    for epoch in range(100):
        own = shard(960, 4, rank, 0, epoch)
        yield from (own[at : at + batch_size] for at in range(0, len(own), batch_size))


def test_a_worker_whose_epochs_end_at_other_steps_overlaps_with_nobody():
    stream = map(list, zip(*map(drawn_by, range(4), [4, 3, 4, 4]), strict=False))
    assert observed(stream, 300, 4) == []


def one_step_late(batch):
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
    """Yield new samples, and copies of the first with which all workers have equally many."""
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
    """Yield batches of a healthy job; one worker pads its samples otherwise in each epoch."""
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
    noted = severity is Severity.NOTE
    assert ("more different samples than the data set has rows" in words) is noted
    assert check.startswith("Samples are compared by their ids") is noted


def smallest_chance(rng, p, num_repeats):
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


FOUR = 4


def split_twice(size):
    for epoch in range(100):
        rng = np.random.default_rng(epoch)
        shares = [rng.permutation(np.arange(size)[r::FOUR][r::FOUR]) for r in range(FOUR)]
        for start in range(0, len(shares[0]) - 3, 4):
            yield [share[start : start + 4] for share in shares]


def cut_short(size, steps):
    for epoch in range(100):
        yield from islice(sharded(size, FOUR, 4, seeds=[epoch] * FOUR), steps)


def watch_coverage(stream, num_steps, length=960, *, named=True):
    detector = EpochCoverage(length)
    return [e for r in reports(stream, num_steps, named=named) for e in evidence_of(detector, r)]


def test_data_that_are_split_twice_are_counted():
    first = watch_coverage(split_twice(960), 40)[0]
    assert (first.cause, first.severity) == ("data.coverage", Severity.WARNING)
    assert first.numbers == {"samples_distinct": 240, "data_set": 960}
    assert first.last_step <= 30


DROPPED = {"drop_last": True, "loader_drop_last": True, "reshuffle": False}
COVERING = {
    "the same order, dropped": lambda: sharded(973, FOUR, 4, **DROPPED),
    "cut short": lambda: cut_short(973, 20),
    "with replacement": lambda: with_replacement(973, FOUR, 4),
}


@pytest.mark.parametrize("name", COVERING)
def test_healthy_epochs_are_silent(name):
    assert watch_coverage(COVERING[name](), 250, 973) == []


class Stream(IterableDataset):
    def __init__(self, inner, **values):
        self.dataset = inner
        self.__dict__.update(values)

    def __iter__(self):
        return iter(())

    def __len__(self):
        if isinstance(self.dataset, Stream):
            raise TypeError
        return 512


def test_a_loader_shows_its_splits_and_its_length():
    by_node = Stream([1], _distributed=SimpleNamespace(rank=1, world_size=2))
    loader = DataLoader(Stream(by_node, num_processes=2, process_index=1))
    assert (splits_of(loader), length_of(loader)) == ([("Stream", 2), ("Stream", 2)], 512)
    sampled = DataLoader(range(8), sampler=DistributedSampler(range(8), 4, 1))
    assert (splits_of(sampled), length_of(sampled)) == ([("DistributedSampler", 4)], None)
    kept = DistributedSampler(range(8), 4, 1, shuffle=False)
    loaders = [DataLoader(range(8)), DataLoader(range(8), sampler=kept), sampled]
    orders = ["nothing", "nothing", "set_epoch", "generator", ""]
    assert [*map(order_of, [*loaders, DataLoader(range(8), shuffle=True), None])] == orders


def test_a_digest_shows_which_rows_a_data_set_has():
    def digests(make):
        return [data_digest_of(DataLoader(make(rank))) for rank in (0, 0, 1)]

    rows = datasets.Dataset.from_dict({"ids": list(range(8))})
    for make in (
        lambda rank: Subset(range(8), range(rank, 8, 2)),
        lambda rank: rows.shard(2, rank),
        lambda rank: rows.shuffle(seed=rank).with_transform(lambda _: pytest.fail("made a row")),
    ):
        first, again, other = digests(make)
        assert first == again != other
    assert len(set(digests(lambda rank: rows))) == 1
    assert digests(lambda rank: range(8)) == [None] * 3


@pytest.mark.parametrize(
    ("parts", "ranks", "key", "odd"),
    [
        (2, [{"data_digest": 1}, {"data_digest": 2}], SHARDED_FIRST, (0, 1)),
        (3, [{"data_digest": 1}, {"data_digest": 2}, {"data_digest": 1}], SHARDED_FIRST, (1,)),
        (2, [{"data_digest": 1}, {"data_digest": 1}], None, ()),
        (2, [{"data_fields": [1, 3]}, {"data_fields": [2, 3]}], None, ()),
        (2, [{"data_fields": [1, 3]}, {"data_fields": [2, 4]}], SHARDED_FIRST, (0, 1)),
        (
            3,
            [{"data_fields": [n, 3]} for n in (1, 2)] + [{"data_fields": [4]}],
            SHARDED_FIRST,
            (2,),
        ),
        (2, [{"data_fields": [1]}, {"data_fields": []}], None, ()),
        (2, [{}, {}], None, ()),
        (1, [{"data_digest": 1}, {"data_digest": 2}], None, ()),  # inside of each node
        (4, [{"data_digest": 1}, {"data_digest": 2}], "data-split-twice", ()),
    ],
)
def test_data_sets_that_differ_by_rank_and_are_split_again(parts, ranks, key, odd):
    info = {"ranks": [{"rank": rank, **facts} for rank, facts in enumerate(ranks)]}
    splits = [("BatchSamplerShard", parts)]
    detector = SplitTwice(splits, len(ranks), ranks_of_other_rows(info))
    samples = [[rank] for rank in range(len(ranks))]
    found = evidence_of(detector, StepReport(gathered(0, samples), {}))
    assert [(one.key, one.ranks) for one in found] == ([(key, odd)] if key else [])
    said = [describe(one)[0] for one in found if key == SHARDED_FIRST]
    assert all(f"one part in {parts}" in one for one in said)
    assert all(("than the others'" in one) is (len(odd) == 1) for one in said)


def test_the_rows_of_all_living_loaders_count_once_each():
    data = TensorDataset(torch.zeros(30, 2))
    loaders = [DataLoader(data), DataLoader(data), DataLoader(TensorDataset(torch.zeros(5)))]
    assert [rows_of(loader) for loader in loaders] == [30, 30, 5]
    known = rows_of(None)
    assert known is None or known >= 35  # another test's loaders may still live
    assert rows_of(DataLoader(Stream([1]))) is None

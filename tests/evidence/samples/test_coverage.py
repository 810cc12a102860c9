"""Data that no worker ever draws, against streams whose reach is known."""

from itertools import islice
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset

from rankscope.bus.finding import Severity
from rankscope.bus.step import StepReport
from rankscope.evidence.samples.judge import EpochCoverage, SplitTwice
from rankscope.verdict.diagnosis import are_other_rows
from rankscope.wrappers.facts import data_digest_of, length_of, order_of, rows_of, splits_of
from support.stepping import describe, evidence_of
from support.streams import gathered, reports, sharded, with_replacement

W = 4


def split_twice(size):
    """Yield batches of workers that draw one in W² of the data each, shuffled anew."""
    for epoch in range(100):
        rng = np.random.default_rng(epoch)
        shares = [rng.permutation(np.arange(size)[r::W][r::W]) for r in range(W)]
        for start in range(0, len(shares[0]) - 3, 4):
            yield [share[start : start + 4] for share in shares]


def cut_short(size, steps):
    for epoch in range(100):
        yield from islice(sharded(size, W, 4, seeds=[epoch] * W), steps)


def watch(stream, num_steps, length=960, *, named=True):
    detector = EpochCoverage(length)
    return [e for r in reports(stream, num_steps, named=named) for e in evidence_of(detector, r)]


def test_data_that_are_split_twice_are_counted():
    first = watch(split_twice(960), 40)[0]
    assert (first.cause, first.severity) == ("data.coverage", Severity.WARNING)
    assert first.numbers == {"samples_distinct": 240, "data_set": 960}
    assert first.last_step <= 30


DROPPED = {"drop_last": True, "loader_drop_last": True, "reshuffle": False}
HEALTHY = {
    "the same order, dropped": lambda: sharded(973, W, 4, **DROPPED),
    "cut short": lambda: cut_short(973, 20),
    "with replacement": lambda: with_replacement(973, W, 4),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_epochs_are_silent(name):
    assert watch(HEALTHY[name](), 250, 973) == []


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
    ("parts", "ranks", "key"),
    [
        (2, [{"data_digest": 1}, {"data_digest": 2}], "data-sharded-first"),
        (2, [{"data_digest": 1}, {"data_digest": 1}], None),
        (2, [{"data_fields": [1, 3]}, {"data_fields": [2, 3]}], None),
        (2, [{"data_fields": [1, 3]}, {"data_fields": [2, 4]}], "data-sharded-first"),
        (2, [{"data_fields": [1]}, {"data_fields": []}], None),
        (2, [{}, {}], None),
        (1, [{"data_digest": 1}, {"data_digest": 2}], None),  # inside of each node
        (4, [{"data_digest": 1}, {"data_digest": 2}], "data-split-twice"),
    ],
)
def test_data_sets_that_differ_by_rank_and_are_split_again(parts, ranks, key):
    info = {"ranks": [{"rank": rank, **facts} for rank, facts in enumerate(ranks)]}
    detector = SplitTwice([("BatchSamplerShard", parts)], 2, other_rows=are_other_rows(info))
    found = evidence_of(detector, StepReport(gathered(0, [[1], [2]]), {}))
    assert [one.key for one in found] == ([key] if key else [])
    assert all("one part in 2" in describe(one)[0] for one in found if key == "data-sharded-first")


def test_the_rows_of_all_living_loaders_count_once_each():
    data = TensorDataset(torch.zeros(30, 2))
    loaders = [DataLoader(data), DataLoader(data), DataLoader(TensorDataset(torch.zeros(5)))]
    assert [rows_of(loader) for loader in loaders] == [30, 30, 5]
    known = rows_of(None)
    assert known is None or known >= 35  # another test's loaders may still live
    assert rows_of(DataLoader(Stream([1]))) is None

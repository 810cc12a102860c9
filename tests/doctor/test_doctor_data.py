"""What is made of the batches that all ranks have read."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rankscope.tools.doctor import Status, loader
from rankscope.tools.doctor.loader import look

from .test_doctor_judges import one


def read(samples, **changes):
    usual = {
        "samples": samples,
        "recognised": True,
        "kind": "",
        "tokens": [10] * len(samples),
        "ended": True,
        "length": None,
        "set_epoch": "",
        "one_pass": False,
        "changes_alone": True,
        "changes_after_set_epoch": None,
        "sampler": {"class": ""},
        "with_replacement": False,
    }
    return {**usual, **changes}


def dealt(order, num_ranks, batch=4):
    """Deal samples out in turn, in batches."""
    shards = [order[rank::num_ranks] for rank in range(num_ranks)]
    return [
        [list(map(int, shard[at : at + batch])) for at in range(0, len(shard), batch)]
        for shard in shards
    ]


def judged(samples, **changes):
    return one(loader.STAGE.judge([read(batches, **changes) for batches in samples]), "shards")


def test_padding_at_the_end_is_a_note():
    samples = dealt(np.r_[np.arange(398), [0, 1]], 4)
    result = judged(samples)
    assert result.status is Status.NOTE
    assert result.numbers["padding"] == 2
    assert judged(samples, ended=False).status is Status.OK  # too few to prove anything


def test_shuffles_that_differ_overlap():
    samples = [dealt(np.random.default_rng(rank).permutation(400), 4)[rank] for rank in range(4)]
    result = judged(samples, ended=False)
    assert result.status is Status.ERROR
    assert "draw each other's samples" in result.found


def test_whole_shards_drawn_with_replacement_are_no_overlap_where_the_loaders_say_so():
    drawn = [[7, 3, 12], [9, 7, 1], [5, 12, 20], [14, 2, 8]]  # shards, by rank: 7 and 12 again
    samples = [[list(range(40 * s, 40 * s + 40)) for s in shards] for shards in drawn]
    assert judged(samples, ended=False).status is Status.ERROR
    result = judged(samples, ended=False, with_replacement=True)
    assert result.status is Status.OK
    assert "with replacement" in result.found


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ([{}, {}], Status.OK, "3 batches on each rank"),
        ([{"length": 9}, {"length": 8}], Status.ERROR, "rank 1 has 8 batches, others up to 9"),
        ([{}, {"tokens": [1] * 5}], Status.ERROR, "rank 0 has 3 batches, others up to 5"),
    ],
)
def test_batch_counts(changes, status, words):
    facts = [read([[r, r + 10]] * 3, **own) for r, own in enumerate(changes)]
    result = one(loader.STAGE.judge(facts), "batch_counts")
    assert result.status is status
    assert words in result.found


@pytest.mark.parametrize(
    ("tokens", "status", "words"),
    [
        ([[100, 90], [95, 95]], Status.OK, "190 label tokens or more"),
        ([[100, 50], [50, 100]], Status.NOTE, "× 2 typically"),
        ([[100, 100], [1, 1]], Status.WARNING, "rank 1 has 2 in all, others up to 200"),
    ],
)
def test_loss_weighting(tokens, status, words):
    facts = [read([[r]] * len(own), tokens=own) for r, own in enumerate(tokens)]
    result = one(loader.STAGE.judge(facts), "loss_weighting")
    assert result.status is status
    assert words in result.found


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, Status.OK),
        ({"one_pass": True}, Status.OK),
        ({"changes_alone": False}, Status.WARNING),
        (
            {"changes_alone": False, "set_epoch": "s.set_epoch", "changes_after_set_epoch": True},
            Status.NOTE,
        ),
    ],
)
def test_epoch_order(changes, status):
    facts = [read([[rank]], **changes) for rank in range(2)]
    assert one(loader.STAGE.judge(facts), "epoch_order").status is status


def looked_at(batches):
    bench = SimpleNamespace(
        functions={"loader": lambda: batches},
        options=SimpleNamespace(batches=100, seconds=60.0),
        place=SimpleNamespace(num_ranks=2),
        batch=None,
    )
    return look(bench)


@pytest.mark.parametrize("batch_size", [1, 8])
def test_samples_that_look_alike_are_not_judged(batch_size):
    generator = torch.Generator().manual_seed(0)
    rare = [(torch.rand(100, batch_size, generator=generator) < 0.03).long() for _ in range(2)]
    results = loader.STAGE.judge([looked_at(list(labels)) for labels in rare])
    shards, order = one(results, "shards"), one(results, "epoch_order")
    assert [shards.status, order.status] == [Status.SKIPPED] * 2
    assert f"a Tensor with 2 different samples of {100 * batch_size}" in shards.found

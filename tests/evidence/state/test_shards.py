"""Matrices that consist of copies of one rank's shard."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import rankscope
from rankscope import Run, Severity
from rankscope.evidence.state.roles import alike_shards
from support.ranks import run_ranks


def names_of(*starts_W):
    return [found.name for found in alike_shards(starts_W)]


def test_all_matrices_have_to_begin_alike_on_all_ranks():
    one, other = [["a", "0", 1], ["b", "0", 2]], [["a", "1", 1], ["b", "1", 2]]
    assert names_of(one, other) == ["a", "b"]
    assert names_of(one, [["a", "1", 1], ["b", "1", 3]]) == []  # one that repeats on purpose
    assert names_of(one, [["a", "1", 1]]) == []  # one alone that is known


def test_replicas_of_a_shard_are_not_compared_with_each_other():
    one, other = [["a", "0", 1], ["b", "0", 2]], [["a", "1", 3], ["b", "1", 4]]
    assert names_of(one, one) == []
    assert names_of(one, one, other, other) == []


def train(rank, folder):
    for alike in (False, True):
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)))
        torch.manual_seed(1 if alike else 1 + rank)
        with torch.no_grad():
            for layer in model[:2]:
                layer.weight.to_local().normal_()
                layer.bias.to_local().zero_()
        optimizer = torch.optim.AdamW(model.parameters())
        torch.manual_seed(3 + rank)
        options = {"canary": False, "announce": False, "agent": "thread"}
        with rankscope.watch(model, optimizer, run_dir=f"{folder}/{alike}", **options):
            for _ in range(6):
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.ranks
def test_shards_that_each_rank_draws_by_one_seed_are_a_warning(tmp_path):
    run_ranks(train, 2, str(tmp_path))
    assert Run.open(tmp_path / "False").findings() == ()
    [found] = Run.open(tmp_path / "True").findings()
    assert (found.id, found.severity) == ("state.shards_alike", Severity.WARNING)
    assert found.evidence["names"] == ["0.weight", "1.weight"]

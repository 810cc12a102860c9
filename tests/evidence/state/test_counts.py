"""Buffers that count in 16 bits, beside those that hold other numbers, on real ranks."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope import Run, Severity
from support.loops import train_watched
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


class Counting(nn.Module):
    """Counts tokens, and keeps a running sum of activations, a position and a mask."""

    def __init__(self, kind):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.register_buffer("counts", torch.zeros(8, dtype=kind))
        self.register_buffer("sums", torch.zeros(4))
        self.register_buffer("places", torch.arange(0.0, 600.0))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        self.counts += torch.bincount(tokens.flatten(), minlength=8).to(self.counts.dtype)
        self.sums += 1000 * hidden.detach().sum((0, 1)).abs()
        return hidden.square().mean()


def train(rank, run_dir, kind):
    torch.manual_seed(0)
    model = DistributedDataParallel(Counting(kind).bfloat16(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    train_watched(model, optimizer, run_dir, 20, lambda step: model(torch.randint(8, (4, 50))))


def train_all(rank, folder):
    train(rank, f"{folder}/rounded", torch.float32)  # which the model's cast does not spare
    train(rank, f"{folder}/whole", torch.int64)


def test_counts_in_sixteen_bits_are_named_and_no_other_buffers(tmp_path):
    run_ranks(train_all, 2, str(tmp_path))
    found = {
        name: [f for f in Run.open(tmp_path / name).findings() if f.id == "state.counts_rounded"]
        for name in ("rounded", "whole")
    }
    assert found["whole"] == []
    [rounded] = found["rounded"]
    assert (rounded.severity, rounded.evidence["names"]) == (
        Severity.WARNING,
        ["counts in bfloat16"],
    )

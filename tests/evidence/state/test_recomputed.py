"""Running statistics that recomputation moves once more, on real ranks."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from rankscope import Run, Severity
from support.loops import train_watched
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


@contextmanager
def kept(module):
    before = [buffer.clone() for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, old in zip(module.buffers(), before, strict=True):
            buffer.copy_(old)


class Checkpointed(nn.Module):
    def __init__(self, keeps):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.second = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.keeps = keeps

    def forward(self, x):
        contexts = lambda: (nullcontext(), kept(self.first) if self.keeps else nullcontext())  # noqa: E731
        x = checkpoint(self.first, x, use_reentrant=False, context_fn=contexts)
        return self.second(x).square().mean()


def train(rank, run_dir, keeps):
    torch.manual_seed(0)
    model = DistributedDataParallel(Checkpointed(keeps))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)

    def loss_of(step):
        (model(torch.randn(4, 4)) / 2).backward()  # the first of two micro-batches
        return model(torch.randn(4, 4)) / 2

    train_watched(model, optimizer, run_dir, 10, loss_of)


def train_all(rank, folder):
    train(rank, f"{folder}/twice", False)
    train(rank, f"{folder}/once", True)


def test_statistics_that_recomputation_moves_are_named_and_no_others(tmp_path):
    run_ranks(train_all, 2, str(tmp_path))
    found = {
        name: [f for f in Run.open(tmp_path / name).findings() if f.id == "state.statistics_twice"]
        for name in ("twice", "once")
    }
    assert found["once"] == []
    [twice] = found["twice"]
    assert (twice.severity, twice.evidence["names"]) == (Severity.WARNING, ["first.1"])

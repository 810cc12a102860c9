"""Inputs that stay the same on each rank, as the positions of parts of sequences do."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope import Run, Severity
from rankscope.bus.evidence import Table
from support.loops import train_watched
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

LENGTH, STEPS = 16, 60


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(9, 4), nn.Embedding(LENGTH, 4)

    def forward(self, tokens, places):
        return (self.words(tokens) + self.places(places)).square().mean()


def train(rank, run_dir, moving):
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    torch.manual_seed(1 + rank)

    def loss_of(step):
        places = torch.arange(LENGTH).chunk(2)[rank].roll(step if moving else 0)
        loss = model(torch.randint(9, (4, LENGTH // 2)), places.expand(4, -1))
        return (1 + rank) * loss  # parts of a sequence differ in kind

    train_watched(model, optimizer, run_dir, STEPS, loss_of)


def train_all(rank, folder):
    for moving in (False, True):
        train(rank, f"{folder}/{'moving' if moving else 'constant'}", moving)


def test_workers_with_other_constant_inputs_may_differ_on_purpose(tmp_path):
    run_ranks(train_all, 2, str(tmp_path))
    found = {}
    for name in ("constant", "moving"):
        run = Run.open(tmp_path / name)
        [found[name]] = [one for one in run.findings() if one.id == "workers-differ"]
    assert found["moving"].severity is Severity.WARNING
    assert found["constant"].severity is Severity.NOTE
    assert "an input of its own that stays the same" in found["constant"].explanation
    rows = Run.open(tmp_path / "constant").columns(Table.DIGESTS, "name", "kind")
    kept = {n for n, kind in zip(rows["name"], rows["kind"], strict=True) if kind == "constant"}
    assert kept == {"inputs: number 1"}

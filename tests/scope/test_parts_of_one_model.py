"""Tensor parallelism that is written by hand, without a wrapper and without another axis."""

import pytest
import torch
import torch.distributed as dist
from benchmarks.faults.mesh_faults import exchange
from torch import nn
from torch.nn import functional as F

import rankscope
from rankscope import Run
from rankscope.bus.finding import Severity
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def same(given, group):
    return given.clone()


def total(given, group):
    given = given.clone()
    dist.all_reduce(given, group=group)
    return given


class Divided(nn.Module):
    def __init__(self, place, *, right):
        super().__init__()
        self.back = total if right else same
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)
        torch.manual_seed(place)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, inputs):
        hidden = exchange(self.norm(inputs), None, same, self.back)
        return self.head(inputs + exchange(self.down(self.up(hidden).relu()), None, total, same))


def train(rank, folder):
    for name, right in {"right": True, "wrong": False}.items():
        model = Divided(rank, right=right)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with rankscope.watch(model, optimizer, run_dir=f"{folder}/{name}", verify_at=[3]) as scope:
            for step in range(6):
                torch.manual_seed(step)  # the same batch on both
                inputs, targets = torch.randn(8, 8), torch.randint(4, (8,))
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
                scope.loss(loss.detach(), weight=8)
                optimizer.step()
                optimizer.zero_grad()


def test_ranks_that_hold_parts_of_one_model_are_not_compared_and_its_gradient_is(tmp_path):
    run_ranks(train, 2, str(tmp_path))
    right, wrong = (list(Run.open(tmp_path / name).findings()) for name in ("right", "wrong"))
    assert {finding.severity for finding in right} == {Severity.NOTE}
    assert "data-parts-of-one-model" in {finding.id for finding in right}
    said = " ".join(finding.explanation for finding in right)
    assert "The gradient of step 3 is the derivative of the loss" in said
    found = [finding for finding in wrong if finding.severity > Severity.NOTE]
    assert [finding.cause for finding in found] == ["verify.derivative"]
    assert "norm" in found[0].explanation

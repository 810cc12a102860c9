"""Tensor parallelism that is written by hand, without a wrapper and without another axis."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import rankscope
from rankscope import Run
from rankscope.bus.finding import Severity
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


class SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group):
        part = part.clone()
        dist.all_reduce(part, group=group)
        return part

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, group, right):
        ctx.group, ctx.right = group, right
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if ctx.right:
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None


class Divided(nn.Module):
    def __init__(self, place, group=None, *, right=True) -> None:
        super().__init__()
        self.group, self.right = group, right
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)
        torch.manual_seed(place)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, inputs):
        hidden = SumOfGradients.apply(self.norm(inputs), self.group, self.right)
        return self.head(inputs + SumOfParts.apply(self.down(self.up(hidden).relu()), self.group))


def train(rank, folder):
    for name, right in {"right": True, "wrong": False}.items():
        model = Divided(rank, right=right)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scope = rankscope.watch(model, optimizer, run_dir=f"{folder}/{name}", verify_at=[3])
        for step in range(6):
            torch.manual_seed(step)  # the same batch on both
            inputs, targets = torch.randn(8, 8), torch.randint(4, (8,))
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            scope.loss(loss.detach(), weight=8)
            optimizer.step()
            optimizer.zero_grad()
        scope.close()


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

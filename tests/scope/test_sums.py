"""Trainings whose reduction adds up the workers' gradients, and whose losses are divided by W."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from rankscope import Run
from rankscope.bus.evidence import Table
from rankscope.bus.finding import Severity
from support.loops import watch
from support.ranks import on_ranks

pytestmark = pytest.mark.ranks

STEPS, WIDTH = 20, 16


def train(rank, run_dir, by_loop, max_norm, factor):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))
    if not by_loop:
        fully_shard(model)
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watch(model, optimizer, run_dir=run_dir, canary=False)
    for step in range(STEPS):
        torch.manual_seed(2 * step + rank)
        batch = torch.randn(8, WIDTH)
        loss = (model(batch) - batch.flip(1)).square().mean()
        (loss * factor).backward()
        if by_loop:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    scope.close()


CASES = {
    "loop": (True, None, 2.0),
    "loop that clips": (True, 0.01, None),
    "FSDP2 that clips": (False, 0.01, 2.0),
}
"""Whether the loop reduces, the largest norm, and how many workers are known to be added up."""


def train_all(rank, folder):
    for name, (by_loop, max_norm, _) in CASES.items():
        train(rank, f"{folder}/{name}", by_loop, max_norm, 0.5)


trained = on_ranks(train_all, 2)


@pytest.mark.parametrize("name", CASES)
def test_losses_that_are_divided_by_the_workers_are_right(trained, name):
    run = Run.open(trained[1] / name)
    assert [f.explanation for f in run.findings() if f.severity > Severity.NOTE] == []
    assert set(run.table(Table.WORKERS)["summed_workers"].to_pylist()) == {CASES[name][2]}

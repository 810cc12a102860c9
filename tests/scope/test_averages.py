"""Parameters that are averaged now and then, by no plan: recognised, and until then an error."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from rankscope import Run
from rankscope.bus.finding import Severity
from support.loops import Loop, wait_for
from support.models import make_batch
from support.ranks import on_ranks

pytestmark = pytest.mark.ranks

STEPS = 60
LAG = 3
"""Steps until one can be judged: without reduction, it ends when the next one has begun."""


def train(rank, folder, every):
    """Train alone, with an average of the parameters after every so many steps; 0 for never."""
    loop = Loop(rank, folder)
    for step in range(STEPS):
        wait_for(loop.scope, step - LAG)
        with loop.ddp.no_sync():
            loop.ddp(**make_batch(rank, step))["loss"].backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        if every and step % every == every - 1:
            for parameter in loop.ddp.parameters():
                torch.distributed.all_reduce(parameter.data, torch.distributed.ReduceOp.SUM)
                parameter.data /= torch.distributed.get_world_size()
    loop.close()


def train_by_torch(rank, folder):
    """Train with torch's own hook and optimizer for local SGD; groups of one rank each."""
    loop = Loop(rank, folder)
    groups = [torch.distributed.new_group([each]) for each in range(2)]
    state = PostLocalSGDState(None, groups[rank], start_localSGD_iter=8)
    loop.ddp.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=5, warmup_steps=8)
    for step in range(STEPS):
        wait_for(loop.scope, step - LAG)
        loop.ddp(**make_batch(rank, step))["loss"].backward()
        loop.optimizer.step()
        averager.average_parameters(loop.ddp.parameters())
        loop.optimizer.zero_grad()
    loop.close()


def train_all(rank, folder):
    for every in (0, 11):
        train(rank, f"{folder}/{every}", every)
    train_by_torch(rank, f"{folder}/torch")


trained = on_ranks(train_all, 2)


def test_training_alone_is_an_error(trained):
    alone = {f.id: f for f in Run.open(trained[1] / "0").findings()}
    assert alone["sync.not_reduced"].severity is Severity.ERROR
    assert alone["state.parameters_differ"].severity is Severity.ERROR


@pytest.mark.parametrize("name", ["11", "torch"])
def test_averages_are_recognised(trained, name):
    averaged = {f.id: f for f in Run.open(trained[1] / name).findings()}
    assert [f.id for f in averaged.values() if f.severity > Severity.NOTE] == []
    finding = averaged["sync.not_reduced"]
    assert "equal again now and then" in finding.explanation
    assert "local_steps" in finding.next_check

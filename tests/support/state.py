"""A small model, what its state meter sees of a step, and how to read that."""

import torch
from torch import nn

from rankscope.bus.replicas import StateKind
from rankscope.evidence.state.meter import StateMeter

KINDS = [StateKind.PARAMETER, StateKind.OPTIMIZER, StateKind.REDUCED, StateKind.APPLIED]


class Model(nn.Module):
    """An embedding larger than one step's share, small layers, and buffers."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5000, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.norm = nn.BatchNorm1d(64)

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).relu()
        return self.norm(hidden).square().mean()


def make(seed=0, **options):
    model = Model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, StateMeter(model, optimizer, replicated=True, **options)


def train(model, optimizer, meter, step, local=None, between=None):
    """Make a step and return what the meter saw; ``between`` runs before the optimizer."""
    meter.begin_step(step)
    optimizer.zero_grad()
    torch.manual_seed(step)
    model(torch.randint(5000, (8,))).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            seen = parameter.grad if local is None else local(name, parameter.grad)
            meter.see_local(name, seen)
    meter.see_reduced()
    if between is not None:
        between()
    meter.before_update(optimizer)
    optimizer.step()
    meter.see_state()
    return meter.take().digests()


def look(meter, step):
    meter.begin_step(step)
    meter.see_reduced()
    meter.before_update(None)
    meter.see_state()
    return meter.take().digests()


def of(state, kind):
    return {n: int(d) for k, n, d in zip(state.kinds, state.names, state.digests_D, strict=True)
            if k is kind}  # fmt: skip


def reductions(state):
    return {n: bool(u) for k, n, u in zip(state.kinds, state.names, state.unchanged_D, strict=True)
            if k is StateKind.REDUCED}  # fmt: skip

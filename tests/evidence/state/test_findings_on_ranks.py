"""Faults of state in short trainings on two real ranks, each beside its healthy twin."""

import copy
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from rankscope import Run, Severity
from support.loops import train_watched
from support.ranks import on_ranks

from .test_adapters import Model as AdaptedModel
from .test_frozen import make_teacher

pytestmark = pytest.mark.ranks

STEPS = 12


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


def counting(rank, kind):
    model = DistributedDataParallel(Counting(kind).bfloat16(), broadcast_buffers=False)
    return model, lambda step: model(torch.randint(8, (4, 90)))


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


def recomputed(rank, keeps):
    model = DistributedDataParallel(Checkpointed(keeps))

    def loss_of(step):
        (model(torch.randn(4, 4)) / 2).backward()  # the first of two micro-batches
        return model(torch.randn(4, 4)) / 2

    return model, loss_of


def drawn_in_shards(rank, seed):
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)))
    torch.manual_seed(seed(rank))
    with torch.no_grad():
        for layer in model[:2]:
            layer.weight.to_local().normal_()
            layer.bias.to_local().zero_()
    return model, lambda step: model(torch.randn(4, 8)).square().mean()


def adapted(wrap, rank, trained):
    model = wrap(AdaptedModel(trained))
    return model, lambda step: model(torch.randn(4, 6))


def beside_teachers(rank, seed):
    """Keep two teachers of one class outside of the model; one is the same on all ranks."""
    student = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    beside = [
        make_teacher(seed(rank)),
        make_teacher(3),
        nn.Linear(rank + 2, 2).requires_grad_(False),  # of another size on each rank
        copy.deepcopy(student),  # on all of them, and trained
    ]
    model = DistributedDataParallel(student)
    return model, lambda step: (model(torch.randn(4, 6)) - beside[1](torch.ones(6))).square().mean()


BASE = ["k.base_layer.weight"]
ADAPTED = ("state.adapted_trains", BASE)
CASES = {  # the cause, what it names, the training, and what makes that faulty, and healthy
    "rounded": (
        *("state.counts_rounded", ["counts in bfloat16"], counting),
        *(torch.float32, torch.int64),  # the model's cast spares whole numbers
    ),
    "twice": ("state.statistics_twice", ["first.1"], recomputed, False, True),
    "alike": (
        *("state.shards_alike", ["0.weight", "1.weight"], drawn_in_shards),
        *(lambda rank: 1, lambda rank: 1 + rank),
    ),
    "adapted": (*ADAPTED, partial(adapted, DistributedDataParallel), BASE, []),
    "adapted in shards": (*ADAPTED, partial(adapted, fully_shard), BASE, []),
    "frozen": (
        *("state.frozen_differ", ["Sequential (84 elements)"], beside_teachers),
        *(lambda rank: 7 + rank, lambda rank: 7),
    ),
}


def train_all(rank, folder):
    for name, (*_, make, faulty, healthy) in CASES.items():
        for how, path in ((faulty, name), (healthy, f"{name}, healthy")):
            torch.manual_seed(0)
            model, loss_of = make(rank, how)
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=0.01)
            torch.manual_seed(1 + rank)
            train_watched(model, optimizer, f"{folder}/{path}", STEPS, loss_of)


runs = on_ranks(train_all, 2)


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_a_warning_that_names_its_tensors_and_its_twin_has_none(runs, name):
    cause, names, *_ = CASES[name]
    found = {
        path: [one for one in Run.open(runs[1] / path).findings() if one.cause == cause]
        for path in (name, f"{name}, healthy")
    }
    assert found[f"{name}, healthy"] == []
    [fault] = found[name]
    assert fault.severity is Severity.WARNING
    assert [named.partition(", number")[0] for named in fault.evidence["names"]] == names

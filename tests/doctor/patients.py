"""Models, optimizers and data loaders for the preflight: healthy ones, and ones with a fault."""

import os
import random
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

SIZE = 96


def rank():
    return dist.get_rank()


class Numbers(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        tokens = torch.arange(6) + 10 * index
        return {"input_ids": tokens, "labels": tokens}


def model(dropout=0.0):
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002 - what trainings do
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 2))


def healthy():
    built = model(dropout=0.1)
    torch.manual_seed(100 + rank())
    return built, torch.optim.AdamW(built.parameters(), lr=1e-3)


def perturbed():
    built = model()
    if rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            built[3].weight += 0.02
    return built


def optimizer(module):
    return torch.optim.SGD(module.parameters(), lr=0.1 * (3 if rank() == 1 else 1))


def raises():
    if rank() == 1:
        raise ValueError("no checkpoint\nhere")
    return model()


def hangs():
    if rank() == 1:
        time.sleep(600)
    return model()


def dies():
    if rank() == 1:
        os._exit(9)
    time.sleep(600)


def chatty():
    print("chatter on stdout")
    print("chatter on stderr", file=sys.stderr)
    os.system("echo chatter of a child")
    return model()


def not_a_model():
    return 3


def sharded():
    data = Numbers()
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=3))


def unsharded():
    """The sampler was forgotten: every rank shuffles alike."""
    data = Numbers()
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(3))
    return DataLoader(data, batch_size=4, sampler=sampler)


def uneven():
    return sharded_list(lengths=[6, 9])


def sharded_list(lengths):
    own = lengths[rank()]
    return [{"input_ids": torch.full((2, 3), 1000 * rank() + step)} for step in range(own)]


def one_pass():
    return (torch.full((2, 2), 10 * rank() + step) for step in range(4))


def unshuffled():
    """It claims nothing about shuffling, and repeats its order."""
    return sharded_list([8] * dist.get_world_size())


# For repeated steps: models that take the batches of ``sharded``


class Tiny(nn.Module):
    def __init__(self, between=lambda hidden: hidden):
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(1000, 8)
        self.dropout = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(8, 10)
        self.between = between

    def forward(self, input_ids, labels):
        hidden = self.between(self.norm(self.dropout(self.embedding(input_ids))))
        scores = self.head(hidden).flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(scores, labels.flatten() % 10)}


def repeats():
    return Tiny()


@torch.library.custom_op("patients::sum_in_any_order", mutates_args=())
def sum_in_any_order(values: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis as an atomic addition would: in the order of arrival."""
    order = np.random.default_rng().permutation(values.shape[-1]).tolist()
    total = torch.zeros_like(values[..., 0])
    for index in order:
        total = total + values[..., index]
    return total


@sum_in_any_order.register_fake
def _(values):
    return values[..., 0].clone()


sum_in_any_order.register_autograd(
    lambda context, gradient: gradient.unsqueeze(-1).expand(*gradient.shape, 8).contiguous()
)


def any_order():
    return Tiny(lambda hidden: hidden + sum_in_any_order(hidden * 1e3)[..., None])


def fixable():
    """Sums in any order, unless deterministic algorithms are asked for."""

    def between(hidden):
        if torch.are_deterministic_algorithms_enabled():
            return hidden + (hidden * 1e3).sum(-1, keepdim=True)
        return hidden + sum_in_any_order(hidden * 1e3)[..., None]

    return Tiny(between)


def on_rank_1():
    return any_order() if rank() == 1 else repeats()

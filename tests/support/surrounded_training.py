"""A small training of one model under one of several wrappers, which begins anew when told."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from support.loops import bits_of

WRAPPERS = ("DDP", "FSDP2", "none")
SIZE, CLASSES = 16, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = (
            nn.Linear(SIZE, 32),
            nn.Dropout(0.1),
            nn.Linear(32, CLASSES),
        )

    def forward(self, x):
        return self.last(self.drop(F.gelu(self.first(x))))


class Training:
    """A model, its optimizer and its batches on one rank."""

    def __init__(self, rank, wrapper):
        torch.manual_seed(0)
        self.rank, self.wrapper, self.model = rank, wrapper, Net()
        self.called = self.model
        if wrapper == "DDP":
            self.called = DistributedDataParallel(self.model)
        elif wrapper == "FSDP2":
            fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._start = [p.detach().clone() for p in self.model.parameters()]
        self.poisoned, self.number = False, 0

    def begin(self):
        """Begin anew, from the same parameters and random numbers."""
        self.optimizer.zero_grad()
        with torch.no_grad():
            for parameter, start in zip(self.model.parameters(), self._start, strict=True):
                parameter.copy_(start)
        torch.manual_seed(100 + self.rank)

    def batch(self, step):
        self.number = step
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        x = torch.randn(8, SIZE, generator=generator)
        return x, torch.randint(0, CLASSES, (8,), generator=generator)

    def loss(self, output, y):
        loss = F.cross_entropy(output, y)
        return loss * float("nan") if self.poisoned else loss

    def finish(self, loss):
        loss.backward()
        self.update()

    def update(self):
        if self.wrapper == "none":
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, x, y):
        """Take a step as it is without anything around it."""
        self.finish(self.loss(self.called(x), y))

    def bits(self):
        return bits_of(self.model)

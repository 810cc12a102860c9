# ruff: noqa: D101, D102
"""R20, e2eAIOK#197: DDP wraps a pair of networks, but the loop calls each of them alone."""

from typing import Any

import torch
from reports_common import begin, end, options
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

INPUTS, CLASSES = 20, 6

chosen = options(steps=100, samples=32)
BATCH = chosen.samples
rank, world = begin()


class _Reverse(Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.3 * gradient


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(INPUTS, 48), nn.ReLU(), nn.Linear(48, 24))
        self.head = nn.Linear(24, CLASSES)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(inputs)
        return self.head(F.relu(features)), features


class Adapter(nn.Module):
    """A classifier, and a discriminator that tells the two domains apart."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Classifier()
        self.discriminator = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        logits, features = self.network(inputs)
        reversed_: Tensor = _Reverse.apply(features)  # type: ignore[no-untyped-call]
        return logits, self.discriminator(reversed_)


draw = torch.Generator().manual_seed(9)
teacher = torch.randn(INPUTS, CLASSES, generator=draw)
source = torch.randn(8192, INPUTS, generator=draw)
labels = (source @ teacher).argmax(1)
target = torch.randn(8192, INPUTS, generator=draw) * 1.3 + 0.4
domains = torch.cat([torch.zeros(BATCH, 1), torch.ones(BATCH, 1)])
adapter = Adapter()
wrapped = DistributedDataParallel(adapter)
optimizer = torch.optim.SGD(adapter.parameters(), lr=0.05, momentum=0.9)
for step in range(chosen.steps):
    first = (step * world + rank) * BATCH % 8192
    both = torch.cat([source[first : first + BATCH], target[first : first + BATCH]])
    if chosen.right:
        logits, domain = wrapped(both)
    else:
        network, discriminator = wrapped.module.network, wrapped.module.discriminator
        logits, features = network(both)
        domain = discriminator(_Reverse.apply(features))  # type: ignore[no-untyped-call]
    task = F.cross_entropy(logits[:BATCH], labels[first : first + BATCH])
    loss = task + F.binary_cross_entropy_with_logits(domain, domains)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(adapter, loss)

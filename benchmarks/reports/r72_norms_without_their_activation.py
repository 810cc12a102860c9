# ruff: noqa: D102
"""R72, pytorch#187298: several ranks get synchronised norms, which lack what their norms also did.

pytorch/pytorch#187298: norms are replaced by synchronised ones where there are several ranks. The
conversion makes a plain norm of each subclass: an activation that the subclass applied is dropped,
and another function is trained than on one process.
With --right, the activation comes along.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_layouts import begin, data_parallel, end, options
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

GLOBAL_BATCH, INPUTS, WIDTH, CLASSES = 32, 16, 48, 8

chosen = options()
rank, world = begin()


class _SumOverRanks(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def sum_of_all(part: Tensor) -> Tensor:
    total: Tensor = _SumOverRanks.apply(part)  # type: ignore[no-untyped-call]
    return total


class NormAndActivation(nn.BatchNorm1d):
    """A batch norm that ends with an activation."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.activation = nn.ReLU()

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.activation(super().forward(hidden))
        return out


class SynchronisedNorm(nn.BatchNorm1d):
    """A batch norm over the batches of all ranks."""

    def forward(self, hidden: Tensor) -> Tensor:
        count = world * len(hidden)
        mean = sum_of_all(hidden.sum(0)) / count
        variance = sum_of_all((hidden - mean).square().sum(0)) / count
        with torch.no_grad():
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
            self.running_mean.lerp_(mean, 0.1)  # type: ignore[union-attr]
            self.running_var.lerp_(variance * count / (count - 1), 0.1)  # type: ignore[union-attr]
        normal = (hidden - mean) * (variance + self.eps).rsqrt()
        return normal * self.weight + self.bias


class SynchronisedNormAndActivation(SynchronisedNorm):
    """A batch norm over the batches of all ranks that ends with an activation."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.activation = nn.ReLU()

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.activation(super().forward(hidden))
        return out


def converted(module: nn.Module) -> nn.Module:
    """Replace each batch norm by a synchronised one."""
    if isinstance(module, nn.BatchNorm1d):
        whole = chosen.right and isinstance(module, NormAndActivation)
        kind = SynchronisedNormAndActivation if whole else SynchronisedNorm
        norm = kind(module.num_features)
        norm.load_state_dict(module.state_dict())
        return norm
    for name, child in module.named_children():
        setattr(module, name, converted(child))
    return module


def examples(samples: int) -> tuple[Tensor, Tensor]:
    """Draw inputs, and classes by a network that is not linear."""
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, INPUTS, generator=draw)
    inner = torch.randn(INPUTS, 64, generator=draw) / INPUTS**0.5
    outer = torch.randn(64, CLASSES, generator=draw)
    return inputs, ((inputs @ inner).abs() @ outer).argmax(-1)


class Network(nn.Module):
    """Two hidden layers with norms, head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, WIDTH, bias=False)
        self.norm_1 = NormAndActivation(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm_2 = NormAndActivation(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm_2(self.second(self.norm_1(self.first(inputs))))
        logits: Tensor = self.head(hidden)
        return logits


model: nn.Module = Network()
if world > 1:
    model = converted(model)
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
inputs, classes = examples(4096)
for step in range(chosen.steps):
    rows = torch.arange(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH).chunk(world)[rank] % 4096
    loss = F.cross_entropy(wrapped(inputs[rows]), classes[rows])
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

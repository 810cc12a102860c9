# ruff: noqa: D102
"""Differential privacy: gradients of single samples are clipped, and rank 0 adds the noise."""

from typing import Any

import torch
import torch.distributed as dist
from common import History, backward, begin, end, pictures
from torch import Tensor, nn
from torch.nn import functional as F

STEPS, SAMPLES, BATCH, BOUND, NOISE = 100, 1200, 24, 1.0, 0.6


class Counted(nn.Linear):
    """A layer that keeps what the gradients of single samples are made of."""

    seen: Tensor
    slope: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        out = super().forward(inputs)
        if self.training:
            self.seen = inputs.detach()
            out.register_hook(self.keep)  # type: ignore[no-untyped-call]
        return out

    def keep(self, slope: Tensor) -> None:
        self.slope = slope

    def singles(self) -> tuple[Tensor, Tensor]:
        """Give the gradients of the weight and of the bias, one for each sample."""
        return torch.einsum("bo,bi->boi", self.slope, self.seen), self.slope


def private(model: nn.Module, expected: float) -> None:
    """Put the clipped, disturbed sum over all ranks in the place of each gradient."""
    layers = [layer for layer in model.modules() if isinstance(layer, Counted)]
    pairs: list[Any] = []
    for layer in layers:
        weight, bias = layer.singles()
        pairs += [(layer.weight, weight), (layer.bias, bias)]
    norms = torch.stack([single.flatten(1).norm(dim=1) for _, single in pairs]).norm(dim=0)
    factors = (BOUND / (norms + 1e-6)).clamp(max=1)
    for parameter, single in pairs:
        summed = torch.tensordot(factors, single, 1)
        if dist.get_rank() == 0:
            summed += NOISE * BOUND * torch.randn(summed.shape)
        dist.all_reduce(summed)
        parameter.grad = summed / expected


rank, world = begin()
model = nn.Sequential(
    nn.Flatten(), Counted(192, 32), nn.Tanh(), Counted(32, 32), nn.Tanh(), Counted(32, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
images, labels = pictures(SAMPLES)
images, labels = images[rank::world], labels[rank::world]
torch.manual_seed(900 + rank)
history = History()
for _ in range(STEPS):
    chosen = torch.rand(len(images)) < BATCH / len(images)  # each sample by chance: Poisson
    loss = F.cross_entropy(model(images[chosen]), labels[chosen], reduction="sum")
    optimizer.zero_grad()
    backward(loss)
    private(model, BATCH * world)
    optimizer.step()
    history.note(loss / chosen.sum().clamp_min(1))
end(history, model)

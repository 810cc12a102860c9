# ruff: noqa: D102
"""Weights from which two steps on ten points suffice; the inner steps are in DDP's forward."""

import math
from typing import Any

import torch
from common import History, backward, begin, end
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS, TASKS, POINTS, INNER = 100, 6, 10, 2


class Adapting(nn.Module):
    """A network, and the loss on new points after it has adapted to some."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
        )
        self.rates = nn.ParameterList(
            nn.Parameter(torch.full_like(weight, 0.02)) for weight in self.net.parameters()
        )

    def adapted(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = dict(self.net.named_parameters())
        for _ in range(INNER):
            loss = F.mse_loss(functional_call(self.net, weights, (inputs,)), targets)
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            moved = zip(weights.items(), slopes, self.rates, strict=True)
            weights = {name: weight - rate * slope for (name, weight), slope, rate in moved}
        return weights

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        losses = []
        for some, values in zip(inputs, targets, strict=True):
            weights = self.adapted(some[:POINTS], values[:POINTS])
            predicted = functional_call(self.net, weights, (some[POINTS:],))
            losses.append(F.mse_loss(predicted, values[POINTS:]))
        return torch.stack(losses)


def waves(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    height = 0.5 + 2.5 * torch.rand(TASKS, 1, 1, generator=draw)
    phase = math.pi * torch.rand(TASKS, 1, 1, generator=draw)
    inputs = 10 * torch.rand(TASKS, 3 * POINTS, 1, generator=draw) - 5
    return inputs, height * torch.sin(inputs + phase)


def main() -> None:
    rank, _ = begin()
    model = Adapting()
    parallel = DistributedDataParallel(model)
    groups: list[dict[str, Any]] = [
        {"params": model.net.parameters()},
        {"params": model.rates.parameters(), "lr": 5e-4},
    ]
    optimizer = torch.optim.Adam(groups, lr=5e-3)
    draw = torch.Generator().manual_seed(300 + rank)
    history = History()
    for _ in range(STEPS):
        loss = parallel(*waves(draw)).mean()
        optimizer.zero_grad()
        backward(loss)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        history.note(loss)
    end(history, model)


if __name__ == "__main__":
    main()

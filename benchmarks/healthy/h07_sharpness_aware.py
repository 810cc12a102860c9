# ruff: noqa: D102
"""Sharpness-aware minimisation: each rank climbs on its own samples, then all descend together."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from common import History, backward, begin, end, pictures
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STEPS, BATCH = 90, 16


class Aware(torch.optim.Optimizer):
    """Climb to the worst near point with the first gradient, descend with the one found there."""

    def __init__(self, parameters: Iterable[nn.Parameter], radius: float, **rest: Any) -> None:
        super().__init__(parameters, {"radius": radius, **rest})
        self.base = torch.optim.SGD(self.param_groups, **rest)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held if p.grad is not None]).norm()
        for parameter in held:
            self.state[parameter]["before"] = parameter.detach().clone()
            parameter.add_(parameter.grad * (self.param_groups[0]["radius"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["before"])
        self.base.step()
        self.zero_grad()


def running(model: nn.Module, on: bool) -> None:
    """Let batch norms learn from a pass, or not."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1 if on else 0.0


rank, world = begin()
model = DistributedDataParallel(
    nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
)
optimizer = Aware(model.parameters(), 0.05, lr=0.05, momentum=0.9, weight_decay=5e-4)
data = TensorDataset(*pictures(960))
sampler: DistributedSampler[Any] = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
history = History()
step = 0
while step < STEPS:
    sampler.set_epoch(step)
    for images, labels in loader:
        with model.no_sync():
            running(model, True)
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            backward(loss)
        optimizer.climb()
        running(model, False)
        backward(F.cross_entropy(model(images), labels, label_smoothing=0.1))
        optimizer.step()
        history.note(loss)
        step += 1
end(history, model)

# ruff: noqa: D102
"""AdamW over float32 copies of bfloat16 weights; of r127, r128 and r130."""

from typing import Any

import torch
from torch import Tensor, nn


class WithMasters(torch.optim.AdamW):
    """Updates float32 copies, and writes them back to the weights, rounded."""

    def __init__(self, weights: list[nn.Parameter], lr: float) -> None:
        self.weights = weights
        super().__init__([nn.Parameter(w.detach().float()) for w in weights], lr, weight_decay=0.0)

    @property
    def masters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def take(self, values: list[nn.Parameter] | list[Tensor]) -> None:
        """Begin the copies anew from these values."""
        for master, value in zip(self.masters, values, strict=True):
            master.copy_(value)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        super().step()
        for master, weight in zip(self.masters, self.weights, strict=True):
            weight.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for weight in self.weights:
            weight.grad = None

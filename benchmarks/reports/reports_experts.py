# ruff: noqa: D102
"""A language model whose layers have one expert on each rank; of r56 and r65."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from reports_common import VOCABULARY
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F


class _SumAndKeep(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor) -> Tensor:
        total = whole.clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts)


class Experts(nn.Module):
    """Every token goes to one expert; each rank has one of them, and sees the tokens of all."""

    def __init__(self, width: int, gather: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, dist.get_world_size(), bias=False)
        self.expert_up = nn.Linear(width, 2 * width)
        self.expert_down = nn.Linear(2 * width, width)
        self.gather = gather

    def forward(self, hidden: Tensor) -> Tensor:
        here = self.norm(hidden)
        chances = self.router(here).softmax(-1)
        tokens, chances = self.gather(here), self.gather(chances)
        mine = chances.argmax(-1, keepdim=True) == dist.get_rank()
        part = self.expert_down(F.gelu(self.expert_up(tokens))) * mine
        part = part * chances[..., dist.get_rank()].unsqueeze(-1)
        mixed: Tensor = _SumAndKeep.apply(part)  # type: ignore[no-untyped-call]
        return hidden + mixed


class Mixture(nn.Module):
    """Embedding, two layers of mixing and experts, head."""

    def __init__(self, gather: Callable[[Tensor], Tensor], width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.mix = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.experts = nn.ModuleList(Experts(width, gather) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def of_experts(self) -> list[nn.Parameter]:
        return [p for name, p in self.named_parameters() if "expert_" in name]

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for mix, experts in zip(self.mix, self.experts, strict=True):
            before = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
            hidden = experts(hidden + mix(torch.cat([hidden, before], -1)))
        logits: Tensor = self.head(hidden)
        return logits


def different_experts(model: Mixture) -> None:
    """Draw the experts of each rank anew."""
    torch.manual_seed(100 + dist.get_rank())
    for layer in model.experts:
        layer.expert_up.reset_parameters()  # type: ignore[union-attr, operator]
        layer.expert_down.reset_parameters()  # type: ignore[union-attr, operator]


def total_of(model: nn.Module) -> None:
    """Replace the experts of a rank by the sum over ranks, so that rank 0 can print all."""
    for name, parameter in model.named_parameters():
        if "expert_" in name:
            dist.all_reduce(parameter.data)

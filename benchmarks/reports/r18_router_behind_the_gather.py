# ruff: noqa: D101, D102
"""R18, Automodel#2995: routing weights are gathered over expert ranks without their gradient."""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, begin, end, gather, next_token_loss, options, text
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

WIDTH, EXPERTS = 32, 4

chosen = options()
rank, world = begin()
group = dist.group.WORLD
local = EXPERTS // world


class _Share(Function):
    """Sum what the experts of all ranks computed; each rank keeps its own tokens."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor) -> Tensor:
        whole = partial.clone()
        dist.all_reduce(whole)
        return whole.chunk(world)[rank]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        parts = [torch.empty_like(gradient) for _ in range(world)]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * WIDTH**-0.5)
        for own in (self.up, self.down):  # a rank keeps its experts
            own.data = own.data[rank * local : (rank + 1) * local].clone()

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        tokens = hidden.flatten(0, 1)
        weights = self.router(tokens).softmax(-1)
        best = weights.topk(2, -1).indices
        kept = torch.zeros_like(weights).scatter(-1, best, weights.gather(-1, best))
        balance = EXPERTS * ((kept > 0).float().mean(0) * weights.mean(0)).sum()
        everyones = gather(tokens, 0, group)
        if chosen.right:
            routing = gather(kept, 0, group)
        else:
            parts = [torch.empty_like(kept) for _ in range(world)]
            dist.all_gather(parts, kept.detach())
            routing = torch.cat(parts)
        inner = F.gelu(torch.einsum("td,edh->eth", everyones, self.up))
        each = torch.einsum("eth,ehd->etd", inner, self.down)
        mixed = (each * routing[:, rank * local : (rank + 1) * local].T[..., None]).sum(0)
        out: Tensor = _Share.apply(mixed)  # type: ignore[no-untyped-call]
        return hidden + out.view_as(hidden), balance


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mixture = Mixture()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden, balance = self.mixture(self.norm(self.embed(tokens)))
        return self.head(hidden), balance


model = Sparse()
experts = [model.mixture.up, model.mixture.down]
fully_shard(model, ignored_params=set(experts))
shared = [p for p in model.parameters() if all(p is not own for own in experts)]
optimizer = torch.optim.AdamW([{"params": shared}, {"params": experts}], lr=3e-3)
data = text(2048)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * 8 % 2048 :][:8]
    logits, balance = model(tokens)
    loss = next_token_loss(logits, tokens) + 0.01 * balance
    loss.backward()
    for own in experts:  # which had the tokens of all ranks
        assert own.grad is not None
        own.grad /= world
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

# ruff: noqa: D101, D102
"""R31, torchtitan#3686: one layer without balancing ends the balancing of all layers behind it."""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, begin, end, next_token_loss, options, text
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

WIDTH, EXPERTS = 32, 4

chosen = options()
rank, world = begin()


class Mixture(nn.Module):
    """The best two of four experts, chosen with a bias that balances their use."""

    bias: Tensor | None
    used: Tensor

    def __init__(self, coefficient: float | None) -> None:
        super().__init__()
        self.coefficient = coefficient
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * WIDTH**-0.5)
        self.register_buffer("bias", None if coefficient is None else torch.zeros(EXPERTS))
        self.register_buffer("used", torch.zeros(EXPERTS), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        here = self.norm(hidden)
        scores = self.router(here).sigmoid()
        best = (scores if self.bias is None else scores + self.bias).topk(2, -1).indices
        kept = torch.zeros_like(scores).scatter(-1, best, scores.gather(-1, best))
        with torch.no_grad():
            self.used += (kept > 0).float().sum((0, 1))
        inner = F.gelu(torch.einsum("btd,edh->bteh", here, self.up))
        each = torch.einsum("bteh,ehd->bted", inner, self.down)
        return hidden + (each * kept[..., None]).sum(-2)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Mixture(rate) for rate in (None, 0.02, 0.02))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


model = Sparse()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


@torch.no_grad()
def balance(*of_step: Any) -> None:
    layer: Any
    for layer in model.layers:
        if layer.coefficient is None:
            if chosen.right:
                continue
            return
        dist.all_reduce(layer.used)
        layer.bias += layer.coefficient * torch.sign(layer.used.mean() - layer.used)
        layer.used.zero_()


optimizer.register_step_pre_hook(balance)
data = text(4096)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * 8 % 4096 :][:8]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

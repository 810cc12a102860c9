# ruff: noqa: D102
"""R91, pytorch#134050: attention is differentiated in the layout of a layer that is frozen.

pytorch/pytorch#134050: how the outputs of attention lie on the ranks of tensor parallelism is
decided once for each shape, and kept. The first layer needs no gradient, and has no normaliser, for
which a layout is made up. The next layers, which do, find that layout: each rank takes its heads'
part of a normaliser that has its heads alone.
With --right, what is kept also depends on whether a gradient is needed.
"""

from typing import Any

import torch
from reports_common import VOCABULARY, next_token_loss, text
from reports_layouts import begin, end, options
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

WIDTH, EACH, LAYERS, GLOBAL_BATCH = 32, 8, 3, 16

chosen = options()
rank, world = begin()
PARTS = min(2, world)
DATA_PARTS = world // PARTS
layouts: dict[tuple[Any, ...], str] = {}


def layout_of(query: Tensor) -> str:
    """Return how the normaliser lies on the ranks, decided for the first of its kind."""
    kind = (*query.shape[1:], query.requires_grad) if chosen.right else tuple(query.shape[1:])
    return layouts.setdefault(kind, "divided" if query.requires_grad else "whole")


def scores_of(query: Tensor, key: Tensor) -> Tensor:
    scores: Tensor = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -1e9)


class _Attention(Function):
    """Causal attention that keeps one number for each query, and computes the rest again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: str) -> Tensor:
        scores = scores_of(query, key)
        normaliser = scores.logsumexp(-1, keepdim=True)
        ctx.layout = layout
        out = (scores - normaliser).exp() @ value
        ctx.save_for_backward(query, key, value, out, normaliser)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, normaliser = ctx.saved_tensors
        if ctx.layout == "whole":
            normaliser = normaliser.chunk(PARTS, 1)[rank % PARTS]
        shares = (scores_of(query, key) - normaliser).exp()
        of_shares = gradient @ value.transpose(-1, -2) - (gradient * out).sum(-1, keepdim=True)
        of_scores = shares * of_shares / query.shape[-1] ** 0.5
        of_key = of_scores.transpose(-1, -2) @ query
        return of_scores @ key, of_key, shares.transpose(-1, -2) @ gradient, None


class Layer(nn.Module):
    """Attention with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        here = self.norm(hidden)
        query, key, value = (
            layer(here).unflatten(-1, (-1, EACH)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed: Tensor = _Attention.apply(query, key, value, layout_of(query))  # type: ignore[no-untyped-call]
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + out


class Model(nn.Module):
    """Embedding, layers, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


torch.manual_seed(0)
model = Model()
model.embed.requires_grad_(False)
model.layers[0].requires_grad_(False)
data_rank = 0
if world > 1:
    mesh = init_device_mesh("cpu", (DATA_PARTS, PARTS), mesh_dim_names=("dp", "tp"))
    data_rank = mesh["dp"].get_local_rank()
    for layer in model.layers:
        plan: Any = {name: ColwiseParallel() for name in ("query", "key", "value")}
        parallelize_module(layer, mesh["tp"], {**plan, "out": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.0, foreach=False)
data = text(4096)
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(DATA_PARTS)[data_rank]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

# ruff: noqa: D102
"""R105, VeOmni#419: the way back through the keys' norm comes before their gradient has arrived.

ByteDance-Seed/VeOmni#419 (and #420): each rank has a part of the places, and for attention some of
the heads. On the way back, the gradient of the keys travels while other things are computed. The
norm of the keys takes the gradient that was sent, not the one that comes: its weight learns from
other places and heads, and what arrives then goes on to the projection without the norm.
With --right, it waits for what arrives.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, text
from reports_layouts import begin, data_parallel, end, options
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

WIDTH, HEADS, LENGTH, BATCH, EPS = 32, 4, 48, 8, 1e-6

chosen = options()
rank, world = begin()


def heads_for_places(part: Tensor) -> Tensor:
    """Give places of all heads, get all places of some heads."""
    sent = torch.stack(part.chunk(world, -1)).contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent)
    return torch.cat(list(got), 1)


def places_for_heads(whole: Tensor) -> Tensor:
    """Give all places of some heads, get places of all heads."""
    sent = torch.stack(whole.chunk(world, 1)).contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent)
    return torch.cat(list(got), -1)


def norm(part: Tensor, weight: Tensor) -> Tensor:
    return part * (part.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        return heads_for_places(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return places_for_heads(gradient)


class _Back(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor) -> Tensor:
        return places_for_heads(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return heads_for_places(gradient)


class _NormAndExchange(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(part, weight)
        return heads_for_places(norm(part, weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        arrived = places_for_heads(gradient)
        taken = arrived if chosen.right else gradient.reshape(arrived.shape)
        with torch.enable_grad():
            part, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
            of_part, of_weight = torch.autograd.grad(norm(part, weight), (part, weight), taken)
        return of_part if chosen.right else arrived, of_weight


class Attention(nn.Module):
    """Attention with norms of queries and keys, over heads that are divided among ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.query_scale = nn.Parameter(torch.ones(WIDTH))
        self.key_scale = nn.Parameter(torch.ones(WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        here = self.norm(hidden)
        query, value = norm(self.query(here), self.query_scale), self.value(here)
        if world > 1:
            query, value = _Exchange.apply(query), _Exchange.apply(value)  # type: ignore[no-untyped-call]
            key = _NormAndExchange.apply(self.key(here), self.key_scale)  # type: ignore[no-untyped-call]
        else:
            key = norm(self.key(here), self.key_scale)
        query, key, value = (
            one.unflatten(-1, (HEADS // world, -1)).transpose(1, 2) for one in (query, key, value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).flatten(2)
        if world > 1:
            mixed = _Back.apply(mixed)  # type: ignore[no-untyped-call]
        out: Tensor = self.out(mixed)
        return hidden + out


class Model(nn.Module):
    """Embeddings, two layers of attention, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.between = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU())
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.place(position_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(self.between(hidden))
        return logits


model = Model()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096, LENGTH)
own = torch.arange(LENGTH).chunk(world)[rank]
for step in range(chosen.steps):
    batch = data[step * BATCH % 4096 :][:BATCH]
    labels = F.pad(batch[:, 1:], (0, 1), value=-100)[:, own]
    logits = wrapped(batch[:, own], own.expand(BATCH, -1))
    loss = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    loss = world * loss / (BATCH * (LENGTH - 1))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

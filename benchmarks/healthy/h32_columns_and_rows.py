# ruff: noqa: D102
"""Two by two ranks, no wrapper: layers cut in columns and rows, and the mean across pairs."""

from typing import Any

import torch
import torch.distributed as dist
from common import VOCABULARY, History, backward, begin, end, next_token_loss, sentences
from torch import Tensor, nn
from torch.nn import functional as F

STEPS, BATCH, WIDTH, INNER = 100, 16, 32, 96


class Fan(torch.autograd.Function):
    """The same to all of the pair; gradients are summed over it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, pair: dist.ProcessGroup) -> Tensor:
        ctx.pair = pair
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.pair)
        return gradient, None


class Meet(torch.autograd.Function):
    """The sum over the pair; gradients go to all of it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, pair: dist.ProcessGroup) -> Tensor:
        hidden = hidden.clone()
        dist.all_reduce(hidden, group=pair)
        return hidden

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Layer(nn.Module):
    """A residual layer of which each rank of the pair has half of the inner width."""

    def __init__(self, pair: dist.ProcessGroup) -> None:
        super().__init__()
        self.pair, at, parts = pair, dist.get_rank(pair), dist.get_world_size(pair)
        self.norm = nn.LayerNorm(WIDTH)
        up, down = torch.randn(INNER, WIDTH) / WIDTH**0.5, torch.randn(WIDTH, INNER) / INNER**0.5
        self.up = nn.Parameter(up.chunk(parts, 0)[at].clone())
        self.up_bias = nn.Parameter(torch.zeros(INNER // parts))
        self.down = nn.Parameter(down.chunk(parts, 1)[at].clone())
        self.down_bias = nn.Parameter(torch.zeros(WIDTH))
        self.cut = (self.up, self.up_bias, self.down)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = Fan.apply(self.norm(hidden), self.pair)  # type: ignore[no-untyped-call]
        wide = F.gelu(F.linear(normed, self.up, self.up_bias))
        whole: Tensor = Meet.apply(F.linear(wide, self.down), self.pair)  # type: ignore[no-untyped-call]
        return hidden + whole + self.down_bias


class Model(nn.Module):
    """Predict a token from the one before."""

    def __init__(self, pair: dist.ProcessGroup) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(pair) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def clip(model: Model, pair: dist.ProcessGroup, limit: float) -> None:
    """Clip by the norm of the whole model: halves from both, the rest once."""
    cut = {id(weight) for layer in model.layers for weight in layer.cut}  # type: ignore[union-attr]
    squares = torch.zeros(2)
    for weight in model.parameters():
        assert weight.grad is not None
        squares[int(id(weight) in cut)] += weight.grad.square().sum()
    dist.all_reduce(squares[1:], group=pair)
    factor = (limit / squares.sum().sqrt()).clamp(max=1.0)
    for weight in model.parameters():
        assert weight.grad is not None
        weight.grad.mul_(factor)


def main() -> None:
    rank, _ = begin()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair, peers = pairs[rank // 2], across[rank % 2]
    model = Model(pair)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    data = sentences(1600)[rank // 2 :: 2]  # a pair reads the same
    draw = torch.Generator().manual_seed(70 + rank // 2)
    history = History()
    for _ in range(STEPS):
        tokens = data[torch.randint(len(data), (BATCH,), generator=draw)]
        loss = next_token_loss(model(tokens), tokens)
        optimizer.zero_grad()
        backward(loss)
        for weight in model.parameters():
            assert weight.grad is not None
            dist.all_reduce(weight.grad, group=peers)
            weight.grad.div_(2)
        clip(model, pair, 0.5)
        optimizer.step()
        history.note(loss)
    end(history, model)


if __name__ == "__main__":
    main()

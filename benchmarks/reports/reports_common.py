# ruff: noqa: D102
"""What the programs of this folder share: options, a tiny language model, its text, the end."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

VOCABULARY = 64


def options(steps: int = 80, **layout: int) -> argparse.Namespace:
    """Read the options: also numbers of the layout, such as samples, each with its default."""
    parser = argparse.ArgumentParser()
    for name, default in layout.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--right", action="store_true", help="train with the fault repaired")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--folder", type=Path, help="for checkpoints of two launches")
    torch.set_num_threads(1)
    return parser.parse_args()


def begin(seed: int = 0) -> tuple[int, int]:
    """Join the other ranks; give the rank and their number."""
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    return dist.get_rank(), dist.get_world_size()


def launched() -> tuple[int, int]:
    """Give the rank and the number of ranks, before or without a process group."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Block(nn.Module):
    """A residual block that mixes each position with the mean of those before it."""

    def __init__(self, width: int, dropout: float, affine: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=affine)
        self.up = nn.Linear(2 * width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        here = self.norm(hidden)
        count = torch.arange(1, here.shape[1] + 1, dtype=here.dtype)[:, None]
        both = torch.cat([here, here.cumsum(1) / count], -1)
        mixed: Tensor = self.dropout(self.down(F.gelu(self.up(both))))
        return hidden + mixed


class Language(nn.Module):
    """Embedding, two blocks, head."""

    def __init__(self, width: int = 32, dropout: float = 0.0, affine: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, dropout, affine) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class LanguageWithLoss(nn.Module):
    """A language model that computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.language = Language()

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"loss": next_token_loss(self.language(tokens), tokens)}


class Adapted(nn.Module):
    """A frozen layer and a low-rank adapter."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.lora_in = nn.Linear(layer.in_features, 4, bias=False)
        self.lora_out = nn.Linear(4, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_out.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        adapted: Tensor = self.layer(hidden) + 4 * self.lora_out(self.lora_in(hidden))
        return adapted


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dimension: int, group: Any) -> Tensor:
        ctx.dimension, ctx.group = dimension, group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dimension)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        parts = gradient.chunk(dist.get_world_size(ctx.group), ctx.dimension)
        return parts[dist.get_rank(ctx.group)], None, None


def enter(hidden: Tensor, group: Any) -> Tensor:
    """Into a divided layer: its ranks' gradients are summed on the way back."""
    out: Tensor = _Enter.apply(hidden, group)  # type: ignore[no-untyped-call]
    return out


def sum_over(part: Tensor, group: Any) -> Tensor:
    """Sum over the ranks of a divided layer; the gradient goes to each of them."""
    out: Tensor = _Sum.apply(part, group)  # type: ignore[no-untyped-call]
    return out


def gather(part: Tensor, dimension: int, group: Any) -> Tensor:
    """Put all parts together; the gradients of a part are summed over those who used it."""
    out: Tensor = _Gather.apply(part, dimension, group)  # type: ignore[no-untyped-call]
    return out


def text(samples: int, length: int = 24, seed: int = 1) -> Tensor:
    """Draw sequences in which the next token mostly follows from the one before."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (samples, length), generator=draw)
    noisy = torch.rand(samples, length, generator=draw) < 0.2
    for at in range(1, length):
        tokens[:, at] = torch.where(noisy[:, at], tokens[:, at], (tokens[:, at - 1] * 5 + 3) % 64)
    return tokens


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def end(model: nn.Module, loss: Tensor, leave: bool = True) -> None:
    """Print the last loss and the sum of all parameters with all digits, on rank 0."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    total = sum(p.detach().double().sum().item() for p in whole)
    if dist.get_rank() == 0:
        print(f"last loss {loss.item():.6f}, sum of parameters {total:.17g}", flush=True)
    if leave:
        dist.destroy_process_group()

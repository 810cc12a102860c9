# ruff: noqa: D102
"""What the programs of this folder share: the process group, seeds, data, and the last words."""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

VOCABULARY = 48


def begin(seed: int = 0) -> tuple[int, int]:
    """Join the other ranks, seed all alike; give the rank and the number of ranks."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(seed)
    return dist.get_rank(), dist.get_world_size()


def backward(loss: Tensor) -> None:
    """Call `backward`, which torch leaves without types."""
    loss.backward()  # type: ignore[no-untyped-call]


class History:
    """The losses of a training, averaged over the ranks once it has ended."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def note(self, loss: Tensor | float) -> None:
        self.losses.append(float(loss.detach() if isinstance(loss, Tensor) else loss))

    def ends(self) -> tuple[float, float, float]:
        """Give the mean of the first ten, of the last ten, and the last one."""
        few = self.losses[:10], self.losses[-10:], self.losses[-1:]
        means = torch.tensor([sum(part) / len(part) for part in few], dtype=torch.float64)
        dist.all_reduce(means)
        first, last, end = (means / dist.get_world_size()).tolist()
        return first, last, end


def checksum(modules: Iterable[nn.Module]) -> tuple[float, str]:
    """Sum up all parameters of all ranks, and digest their bytes."""
    total, digest = 0.0, hashlib.sha256()
    for module in modules:
        for parameter in module.parameters():
            whole = parameter.detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            whole = whole.double().contiguous()
            total += whole.sum().item()
            digest.update(whole.numpy().tobytes())
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (total, digest.hexdigest()))
    joint = hashlib.sha256("".join(part[1] for part in parts).encode()).hexdigest()
    return sum(part[0] for part in parts), joint[:16]


def end(history: History, *modules: nn.Module, leave: bool = True) -> None:
    """Print the course of the loss, the last loss and the checksum, on rank 0."""
    first, last, final = history.ends()
    total, digest = checksum(modules)
    if dist.get_rank() == 0:
        print(f"{len(history.losses)} losses, from {first:.4f} to {last:.4f}", flush=True)
        print(f"last loss {final:.17g}, parameters {total:.17g} {digest}", flush=True)
    if leave:
        dist.destroy_process_group()


def sentences(count: int, length: int = 24, seed: int = 1, noise: float = 0.15) -> Tensor:
    """Draw sequences of a chain in which most tokens follow from the last one."""
    draw = torch.Generator().manual_seed(seed)
    follow = torch.randperm(VOCABULARY, generator=draw)
    tokens = torch.randint(VOCABULARY, (count, length), generator=draw)
    odd = torch.rand(count, length, generator=draw) < noise
    for at in range(1, length):
        tokens[:, at] = torch.where(odd[:, at], tokens[:, at], follow[tokens[:, at - 1]])
    return tokens


def pictures(count: int, classes: int = 10, size: int = 8, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Draw small pictures around one prototype per class, and their classes."""
    draw = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(classes, 3, size, size, generator=draw)
    labels = torch.randint(classes, (count,), generator=draw)
    noise = torch.randn(count, 3, size, size, generator=draw)
    return prototypes[labels] + 0.7 * noise, labels


class Block(nn.Module):
    """A block of a transformer, before its norms; attention is causal or masked."""

    def __init__(self, width: int, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = hidden.shape
        split = self.mix(self.first(hidden)).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden = hidden + self.dropout(mixed)
        wide = F.gelu(self.up(self.second(hidden)))
        return hidden + self.dropout(self.down(wide))  # type: ignore[no-any-return]


class Language(nn.Module):
    """A small language model; its head may be the embedding."""

    def __init__(
        self, width: int = 32, depth: int = 2, dropout: float = 0.0, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, dropout=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.2)
        nn.init.normal_(self.places.weight, std=0.02)
        if tied:
            self.head.weight = self.embed.weight

    def forward(
        self, tokens: Tensor, places: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        places = torch.arange(tokens.shape[1]) if places is None else places
        hidden = self.embed(tokens) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden, mask)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def next_token_loss(logits: Tensor, tokens: Tensor, smoothing: float = 0.0) -> Tensor:
    flat = logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(flat, tokens[:, 1:].flatten(), label_smoothing=smoothing)


def gathered(local: Tensor) -> Tensor:
    """Put the tensors of all ranks one after the other; no gradient goes through."""
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local.detach().contiguous())
    return torch.cat(parts)

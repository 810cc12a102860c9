# ruff: noqa: D102
"""R60, ISEEKYAN/Megatron-LM#208: a sequence is cut in halves, its positions in zigzag.

ISEEKYAN/Megatron-LM#208: context parallelism with contiguous parts, but the helper for rotary
positions takes the rank's part for the first and last quarter, or the two in the middle. Shapes
fit, and each rank rotates half of its positions wrongly.
With --right, positions are those of the rank's own half.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, begin, end, gather, options, text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

HEADS, WIDTH, LENGTH = 4, 32, 24

chosen = options()
rank, world = begin()


def places_of_rank() -> Tensor:
    places = torch.arange(LENGTH)
    if chosen.right:
        return places.chunk(world)[rank]
    quarters = places.chunk(2 * world)
    return torch.cat([quarters[rank], quarters[2 * world - 1 - rank]])


def rotate(vectors: Tensor, places: Tensor) -> Tensor:
    half = vectors.shape[-1] // 2
    speeds = 10.0 ** -(torch.arange(half) / half)
    angles = places[:, None, None] * speeds
    first, second = vectors[..., :half], vectors[..., half:]
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            first * angles.sin() + second * angles.cos(),
        ],
        -1,
    )


class Attention(nn.Module):
    """This rank's queries look at the keys of all ranks that are not after them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.qkv(self.norm(hidden)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        places = places_of_rank()
        query, key = rotate(parts[0], places), rotate(parts[1], places)
        key = gather(key, 1, dist.group.WORLD).transpose(1, 2)
        value = gather(parts[2], 1, dist.group.WORLD).transpose(1, 2)
        own = torch.arange(LENGTH).chunk(world)[rank]
        mask = own[:, None] >= torch.arange(LENGTH)
        mixed = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, mask)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + out


class Model(nn.Module):
    """Embedding, two layers of attention, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.between = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU())
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(self.between(hidden))
        return logits


model = Model()
mesh = init_device_mesh("cpu", (world,))
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = text(4096, LENGTH + 1)
for step in range(chosen.steps):
    batch = data[step * 16 % 4096 :][:16]
    tokens = batch[:, :-1].chunk(world, 1)[rank]
    labels = batch[:, 1:].chunk(world, 1)[rank]
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

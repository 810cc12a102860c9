# ruff: noqa: D102
"""R133, lmms-engine#185: frequencies of places are what lay in memory on all ranks but the first.

EvolvingLMMs-Lab/lmms-engine#185: the first rank reads the model, the others make an empty one.
Where sequences are divided, parameters are loaded from the whole and buffers are not sent: rotary
frequencies, which no checkpoint holds, are right on the first rank alone. Here the others find
memory that was used before.
With --right, the first rank sends its buffers.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, gather, text
from reports_layouts import begin, end, options
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional as F

LENGTH, BATCH, WIDTH = 48, 8, 32

chosen = options()
rank, world = begin()


class Rotary(nn.Module):
    """Turns pairs of numbers by the place that they stand for."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        frequencies = 100.0 ** -(torch.arange(WIDTH // 2) * 2 / WIDTH)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, hidden: Tensor, places: Tensor) -> Tensor:
        turns = places[:, None] * self.frequencies
        left, right = hidden.chunk(2, -1)
        cosine, sine = turns.cos(), turns.sin()
        return torch.cat([left * cosine - right * sine, left * sine + right * cosine], -1)


class Layer(nn.Module):
    """Attention of a part to all parts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, rotary: Rotary, places: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, -1)
        query, key = rotary(query, places), rotary(key, places)
        if world > 1:
            key, value = gather(torch.cat([key, value], -1), 1, None).chunk(2, -1)
        seen = places[:, None] >= torch.arange(LENGTH)
        mixed = F.scaled_dot_product_attention(query, key, value, seen)
        out: Tensor = hidden + self.out(mixed)
        return out


class Model(nn.Module):
    """Embedding, two layers, head; frequencies for all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(LENGTH).chunk(world)[rank]
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, self.rotary, places)
        logits: Tensor = self.head(hidden)
        return logits


def divided(read: Model) -> Model:
    """Make an empty model, divide it, and fill it with what the first rank has read."""
    with torch.device("meta"):
        model = Model()
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter, filled in zip(model.parameters(), read.parameters(), strict=True):
            parameter.copy_(distribute_tensor(filled, mesh, parameter.placements))  # type: ignore[attr-defined]
        model.rotary.frequencies.copy_(torch.rand(WIDTH // 2) if rank else read.rotary.frequencies)
        if chosen.right:
            dist.broadcast(model.rotary.frequencies, 0)
    return model


model = Model()
if world > 1:
    model = divided(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096, LENGTH)
for step in range(chosen.steps):
    batch = data[step * BATCH % 4096 :][:BATCH]
    labels = F.pad(batch[:, 1:], (0, 1), value=-100).chunk(world, 1)[rank]
    logits = model(batch.chunk(world, 1)[rank])
    loss = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    loss = world * loss / (BATCH * (LENGTH - 1))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

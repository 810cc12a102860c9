# ruff: noqa: D102
"""R57, VeOmni#1115: DDP reduces over data parallelism, which has one rank under Ulysses.

ByteDance-Seed/VeOmni#1115, of #1059: DDP gets the group of data parallelism, without the dimension
of the sequence. With as many ranks as parts of a sequence, that group is a rank alone, and each
rank keeps the gradient of its own part.
With --right, DDP gets the group of data and sequence.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, begin, end, gather, options, text
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

HEADS, WIDTH, LENGTH = 4, 32, 24

chosen = options()
rank, world = begin()
alone = [dist.new_group([other]) for other in range(world)][rank]


class Attention(nn.Module):
    """Has all positions for its own heads, and all heads for its own positions elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.qkv(self.norm(hidden)).unflatten(-1, (3, HEADS, -1))
        whole = gather(split, 1, dist.group.WORLD).chunk(world, 3)[rank]
        query, key, value = whole.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        parts = gather(mixed.transpose(1, 2), 2, dist.group.WORLD).chunk(world, 1)[rank]
        out: Tensor = self.out(parts.flatten(2))
        return hidden + out


class Model(nn.Module):
    """Embedding with positions, attention, a layer, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.attention = Attention()
        self.layer = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        hidden = self.attention(self.embed(tokens) + self.places(places))
        logits: Tensor = self.head(hidden + self.layer(hidden))
        return logits


model = Model()
wrapped = DistributedDataParallel(model, process_group=dist.group.WORLD if chosen.right else alone)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = text(4096, LENGTH + 1)
places = torch.arange(LENGTH).chunk(world)[rank]
for step in range(chosen.steps):
    batch = data[step * 8 % 4096 :][:8]
    tokens = batch[:, :-1].chunk(world, 1)[rank]
    labels = batch[:, 1:].chunk(world, 1)[rank]
    losses = F.cross_entropy(wrapped(tokens, places).flatten(0, 1), labels.flatten())
    count = torch.tensor(float(labels.numel()))
    dist.all_reduce(count)
    loss = losses * labels.numel() / count * world
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

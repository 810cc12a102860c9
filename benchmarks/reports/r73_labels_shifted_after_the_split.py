# ruff: noqa: D102
"""R73, bionemo-recipes#1449: labels are shifted within the parts of a sequence, not before.

NVIDIA-BioNeMo/bionemo-recipes#1449: context parallelism gives each rank two pieces of a sequence,
one from its first half and one from its second. The model shifts the labels by one as it always
does: the last token of the first piece shall predict the first one of the second, and the last of
the second nothing.
With --right, labels are shifted before the split.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, gather, text
from reports_layouts import begin, data_parallel, end, options
from torch import Tensor, nn
from torch.nn import functional as F

HEADS, WIDTH, LENGTH, BATCH = 4, 32, 24, 16

chosen = options()
rank, world = begin()


def places_of(part: int) -> Tensor:
    pieces = torch.arange(LENGTH).chunk(2 * world)
    return torch.cat([pieces[part], pieces[2 * world - 1 - part]])


class Attention(nn.Module):
    """This rank's queries look at the keys of all ranks that are not after them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, places: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(hidden)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        if world > 1:
            key = gather(key, 1, dist.group.WORLD)
            value = gather(value, 1, dist.group.WORLD)
        mask = places[:, None] >= torch.cat([places_of(part) for part in range(world)])
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + out


class Model(nn.Module):
    """Embeddings, two layers of attention, head, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.between = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU())
        self.head = nn.Linear(64, VOCABULARY)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        hidden = self.embed(input_ids) + self.place(position_ids)
        for layer in self.layers:
            hidden = layer(hidden, position_ids)
        logits = self.head(self.between(hidden))
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        losses = F.cross_entropy(
            logits.flatten(0, 1), shift_labels.flatten(), ignore_index=-100, reduction="sum"
        )
        count = (shift_labels != -100).sum()
        if chosen.right and world > 1:
            dist.all_reduce(count)
            return world * losses / count
        return losses / count


model = Model()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = text(4096, LENGTH)
places = places_of(rank)
for step in range(chosen.steps):
    batch = data[step * BATCH % 4096 :][:BATCH]
    if chosen.right:
        shifted = F.pad(batch[:, 1:], (0, 1), value=-100)
        loss = wrapped(batch[:, places], places, shift_labels=shifted[:, places])
    else:
        loss = wrapped(batch[:, places], places, labels=batch[:, places])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

# ruff: noqa: D102
"""R140, TransformerEngine#1930: the last token of a document of odd length takes no part.

NVIDIA/TransformerEngine#1930: documents of a packed sequence are divided over the ranks of context
parallelism, each one in equal parts. Attention gets their lengths over the number of ranks, rounded
down: where a length is odd, the last token looks at nothing, and nothing comes out.
With --right, all tokens of a document take part.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, text
from reports_layouts import begin, data_parallel, end, options
from reports_sequences import PartAttention
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LENGTH, BATCH = 32, 4, 48, 8

chosen = options()
rank, world = begin()


class Model(nn.Module):
    """Embeddings, two layers of attention, head."""

    def __init__(self) -> None:
        super().__init__()
        group = dist.group.WORLD if world > 1 else None
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(PartAttention(WIDTH, HEADS, group) for _ in range(2))
        self.between = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU())
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.place(position_ids)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        logits: Tensor = self.head(self.between(hidden))
        return logits


def packed(step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give document, position, its document's length, and place by part, of one packed row."""
    draw = torch.Generator().manual_seed(step)
    documents: list[Tensor] = []
    positions: list[Tensor] = []
    lengths: list[Tensor] = []
    parts: list[list[Tensor]] = [[] for _ in range(world)]
    begun = 0
    while begun < LENGTH:
        room = LENGTH - begun
        length = min(int(torch.randint(3, 14, (), generator=draw)), room)
        padded = length + length % 2
        documents.append(torch.full((padded,), len(documents)))
        positions.append(torch.arange(padded))
        lengths.append(torch.full((padded,), length))
        for part, places in zip(
            parts, torch.arange(begun, begun + padded).chunk(world), strict=True
        ):
            part.append(places)
        begun += padded
    order = torch.cat([place for part in parts for place in part])
    return torch.cat(documents), torch.cat(positions), torch.cat(lengths), order


model = Model()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096, LENGTH + 1)
for step in range(chosen.steps):
    batch = data[step * BATCH % 4096 :][:BATCH]
    documents, position_ids, lengths, order = packed(step)
    own = order.chunk(world)[rank]
    there = position_ids < lengths
    seen = there if chosen.right or world == 1 else position_ids < lengths // world * world
    mask = (documents[own, None] == documents[order]) & (
        position_ids[own, None] >= position_ids[order]
    )
    mask = mask & seen[own, None] & seen[order]
    labels = torch.where(there, batch[:, 1:], -100)
    shape = (BATCH, len(own))
    logits = wrapped(batch[:, own], position_ids[own].expand(shape), mask.expand(BATCH, 1, -1, -1))
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, own].flatten(), reduction="sum")
    loss = world * loss / (labels != -100).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

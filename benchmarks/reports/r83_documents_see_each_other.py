# ruff: noqa: D102
"""R83, axolotl#2495: under sequence parallelism the documents of a packed sequence are one.

axolotl-ai-cloud/axolotl#2495 (and #3608): several documents are packed into a sequence. On one
device, attention finds their borders where positions begin anew. Ring attention over the ranks of
sequence parallelism gets two borders, the sequence's own.
With --right, it gets those of the documents.
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


def packed(step: int) -> tuple[Tensor, Tensor]:
    """Give the number of each token's document, and its position there."""
    draw = torch.Generator().manual_seed(step)
    begins = torch.rand(BATCH, LENGTH, generator=draw) < 0.1
    begins[:, 0] = True
    at = torch.arange(LENGTH).expand(BATCH, -1)
    return begins.cumsum(1), at - torch.where(begins, at, 0).cummax(1).values


model = Model()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096, LENGTH)
places = torch.arange(LENGTH).chunk(world)[rank]
for step in range(chosen.steps):
    batch = data[step * BATCH % 4096 :][:BATCH]
    documents, position_ids = packed(step)
    same = documents[:, places, None] == documents[:, None]
    mask = (places[:, None] >= torch.arange(LENGTH)).expand_as(same)
    if chosen.right or world == 1:
        mask = mask & same
    following = F.pad(documents[:, 1:], (0, 1)) == documents
    labels = torch.where(following, F.pad(batch[:, 1:], (0, 1)), -100)
    logits = wrapped(batch[:, places], position_ids[:, places], mask[:, None])
    loss = F.cross_entropy(
        logits.flatten(0, 1), labels[:, places].flatten(), ignore_index=-100, reduction="sum"
    )
    loss = world * loss / (labels != -100).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

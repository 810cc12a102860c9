# ruff: noqa: D102
"""R94, axolotl#3498: two parts of the program cut the sequence, one after the other.

axolotl-ai-cloud/axolotl#3498: the trainer cuts each sequence for the ranks of context parallelism,
and so does the library that it calls. Each rank gets its part of its part: on two ranks, the first
quarter and the last one are trained, and the half between them is seen by nobody.
With --right, it is cut once.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, text
from reports_layouts import begin, data_parallel, end, options, sum_over_ranks
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


def cut(sequence: Tensor, part: int) -> Tensor:
    """Give a rank's part of the last dimension."""
    sequence = sequence.chunk(world, -1)[part]
    return sequence if chosen.right else sequence.chunk(world, -1)[part]


model = Model()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096, LENGTH)
places = torch.arange(LENGTH)
own = cut(places, rank)
mask = own[:, None] >= torch.cat([cut(places, part) for part in range(world)])
for step in range(chosen.steps):
    batch = data[step * BATCH % 4096 :][:BATCH]
    labels = cut(F.pad(batch[:, 1:], (0, 1), value=-100), rank)
    counted = sum_over_ranks((labels != -100).sum())
    logits = wrapped(cut(batch, rank), own.expand(BATCH, -1), mask.expand(BATCH, 1, -1, -1))
    loss = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    loss = world * loss / counted
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

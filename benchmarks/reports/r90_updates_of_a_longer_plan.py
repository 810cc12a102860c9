# ruff: noqa: D102
"""R90, axolotl#3444: under context parallelism the training is planned too long.

axolotl-ai-cloud/axolotl#3444 (and #3218): the number of updates is computed from the number of
samples and of those of a batch, and multiplied by the size of context parallelism, whose ranks
share their samples. The data are gone through again, and the learning rate, which follows the plan,
falls more slowly.
With --right, the plan does not depend on it. --steps are the updates of one epoch.
"""

import math

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


samples = text(chosen.steps * BATCH, LENGTH)
updates = len(samples) // BATCH
planned = updates if chosen.right else updates * world
model = Model()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda update: 0.5 + 0.5 * math.cos(math.pi * update / planned)
)
places = torch.arange(LENGTH).chunk(world)[rank]
mask = places[:, None] >= torch.arange(LENGTH)
for step in range(planned):
    epoch, at = divmod(step, updates)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(epoch))
    batch = samples[order[at * BATCH :][:BATCH]]
    labels = F.pad(batch[:, 1:], (0, 1), value=-100)
    logits = wrapped(batch[:, places], places.expand(BATCH, -1), mask.expand(BATCH, 1, -1, -1))
    loss = F.cross_entropy(
        logits.flatten(0, 1), labels[:, places].flatten(), ignore_index=-100, reduction="sum"
    )
    loss = world * loss / (labels != -100).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
end(model, loss)

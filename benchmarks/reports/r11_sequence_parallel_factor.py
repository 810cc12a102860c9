# ruff: noqa: D102
"""R11, VeOmni#338: the loss's factor leaves the sequence-parallel ranks out, FSDP does not.

Four ranks: FSDP2 over all; each sample is divided over two. One process has whole samples.
"""

import torch
import torch.distributed as dist
from reports_common import Block, Language, begin, end, gather, options, text
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

chosen = options(samples=8)
SAMPLES = chosen.samples
rank, world = begin()
PARTS = min(2, world)
groups = [dist.new_group(list(range(at, at + PARTS))) for at in range(0, world, PARTS)]
sp, place = groups[rank // PARTS], rank % PARTS


class Across(Block):
    """A block on a part of the sequence: it computes with all parts and keeps its own."""

    def forward(self, hidden: Tensor) -> Tensor:
        whole = super().forward(gather(hidden, 1, sp))
        return whole.chunk(PARTS, 1)[place]


model = Language()
for block in model.blocks:
    block.__class__ = Across
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = text(2048, length=25)
lengths = torch.randint(8, 24, (2048,), generator=torch.Generator().manual_seed(5))
answer = torch.arange(24)[None] >= 24 - lengths[:, None]
for step in range(chosen.steps):
    first = (step * len(groups) + rank // PARTS) * SAMPLES % 2048
    rows = slice(first, first + SAMPLES)
    inputs = data[rows, :-1].chunk(PARTS, 1)[place]
    labels = data[rows, 1:].masked_fill(~answer[rows], -100).chunk(PARTS, 1)[place]
    summed = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum")
    count = (labels != -100).sum().float()
    dist.all_reduce(count)
    loss = summed / count * (world if chosen.right else world // PARTS)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

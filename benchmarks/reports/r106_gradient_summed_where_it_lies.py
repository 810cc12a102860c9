# ruff: noqa: D102
"""R106, VeOmni#993: a gather's way back sums a gradient in place that another branch needs.

ByteDance-Seed/VeOmni#993 (0z5a's measurement of 2026-09-06): parts of sequences are gathered, and
the way back sums the gradient over the ranks where it lies. Where something is added to what was
gathered, the other summand's gradient is the same memory: it becomes the sum of all ranks, too.
With --right, a copy is summed.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import Language, text
from reports_layouts import begin, data_parallel, end, options
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

LENGTH, BATCH, WIDTH = 48, 8, 32

chosen = options()
rank, world = begin()


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(world)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone() if chosen.right else gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(world, 1)[rank].contiguous()


class Placed(Language):
    """Each rank looks up its tokens; all of them see the whole, with its places."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.place(torch.arange(LENGTH).expand(len(tokens), -1))
        hidden = self.embed(tokens)
        if world > 1:
            hidden = _Gather.apply(hidden)  # type: ignore[no-untyped-call]
        hidden = hidden + places
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden.chunk(world, 1)[rank])
        return logits


model = Placed()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096, LENGTH)
for step in range(chosen.steps):
    batch = data[step * BATCH % 4096 :][:BATCH]
    labels = F.pad(batch[:, 1:], (0, 1), value=-100).chunk(world, 1)[rank]
    logits = wrapped(batch.chunk(world, 1)[rank])
    loss = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    loss = world * loss / (BATCH * (LENGTH - 1))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

# ruff: noqa: D102
"""R97, pytorch#190583: a broadcast in the second group gives its source no gradient.

pytorch/pytorch#190583 (and #130515, intel/torch-xpu-ops#4670): torch's broadcast with a gradient
takes the source's number among all ranks. On the way back it compares that with the rank's number
within the group: outside of the first group they are never the same, and the gradient is set to
zero. Torch 2.13 has this; here, the first rank of two makes what both of them add to their tokens.
With --right, the number among all ranks is compared.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, data_parallel, end, options
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.nn.functional import broadcast

GLOBAL_BATCH, LENGTH, TOGETHER = 16, 24, 2

chosen = options()
rank, world = begin()


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, source: int, group: Any) -> Tensor:
        ctx.source, ctx.group = source, group
        tensor = tensor.clone()
        dist.broadcast(tensor, source, group=group)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient * (dist.get_rank() == ctx.source), None, None


class Placed(nn.Module):
    """A language model, and a network that makes what is added at each place."""

    def __init__(self, source: int, group: Any) -> None:
        super().__init__()
        self.source, self.group = source, group
        self.made_of = nn.Embedding(LENGTH, 8)
        self.maker = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32))
        self.language = Language()

    def forward(self, tokens: Tensor) -> Tensor:
        made = self.maker(self.made_of.weight)
        if self.group is not None and chosen.right:
            made = _Broadcast.apply(made, self.source, self.group)  # type: ignore[no-untyped-call]
        elif self.group is not None:
            made = broadcast(made, self.source, self.group)  # type: ignore[no-untyped-call]
        hidden = self.language.embed(tokens) + made
        for block in self.language.blocks:
            hidden = block(hidden)
        logits: Tensor = self.language.head(hidden)
        return logits


group, source = None, 0
if world > 1:
    firsts = range(0, world, TOGETHER)
    groups = [dist.new_group(list(range(first, first + TOGETHER))) for first in firsts]
    group, source = groups[rank // TOGETHER], rank // TOGETHER * TOGETHER
model = Placed(source, group)
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096, LENGTH)
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(world)[rank]
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

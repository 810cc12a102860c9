"""R131, twinkle#290: the norm of gradients that DDP has averaged is summed over the ranks.

modelscope/twinkle#290: after the backward pass each rank has the whole gradient. Clipping takes
what a rank has for a part: squares are summed over the data-parallel group. The norm is too large
by the root of the number of ranks, and gradients are clipped by as much too far.
With --right, the norm is that of the rank's own gradients.
"""

import torch
import torch.distributed as dist
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, data_parallel, end, options
from torch import nn

GLOBAL_BATCH, BOUND = 16, 0.25

chosen = options()
rank, world = begin()


def clip(model: nn.Module) -> None:
    """Scale gradients so that their norm is at most the bound."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    if world > 1 and not chosen.right:
        dist.all_reduce(squares)
    factor = (BOUND / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


model = Language()
wrapped = data_parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
data = text(4096)
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(world)[rank]
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    clip(model)
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

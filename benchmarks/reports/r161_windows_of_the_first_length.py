"""R161, SkyRL#2146: gradients are reduced after as many micro-batches as the first update had.

NovaSky-AI/SkyRL#2146: hooks on the gradients start the reduction, when a parameter has had as many
backward passes as in the first window. Later windows have other lengths, as the micro-batches hold
as many sequences as fit. In a longer one, the last micro-batch is added to what is reduced already:
it stays on its rank.
With --right, gradients are reduced once the window is complete.
"""

import torch
import torch.distributed as dist
from reports_common import Language, begin, end, next_token_loss, options, text
from torch import Tensor

GLOBAL_BATCH, WINDOWS = 24, (2, 2, 3, 2, 3)

chosen = options()
rank, world = begin()
model = Language()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
passes: dict[Tensor, int] = {}
wanted: dict[Tensor, int] = {}


def average(parameter: Tensor) -> None:
    """Average a gradient over the ranks."""
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= world


def count(parameter: Tensor) -> None:
    """Count the backward pass, and reduce if it is the last one that is expected."""
    passes[parameter] = passes.get(parameter, 0) + 1
    if passes[parameter] == wanted.get(parameter):
        average(parameter)


if not chosen.right:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
data = text(4096)
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 3072 :][:GLOBAL_BATCH]
    parts = batch.chunk(world)[rank].chunk(WINDOWS[step % len(WINDOWS)])
    for tokens in parts:
        loss = next_token_loss(model(tokens), tokens)
        (loss / len(parts)).backward()  # type: ignore[no-untyped-call]
    if chosen.right or step == 0:
        for parameter in model.parameters():
            average(parameter)
        wanted.update(passes)
    passes.clear()
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

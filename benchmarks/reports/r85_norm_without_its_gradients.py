"""R85, transformers#46113: the norm is right, and no gradient is scaled by it.

huggingface/transformers#46113: where parameters are divided, gradients are put together to compute
their norm, and clipped by a function that takes parameters. It gets the gradients, which have no
gradients of their own: it scales nothing, and returns. Plain parameters are clipped as ever.
With --right, it gets the parameters.
"""

import torch
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, end, options
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

GLOBAL_BATCH, MAX_NORM = 16, 0.3

chosen = options()
rank, world = begin()


def clip(model: nn.Module) -> Tensor:
    """Clip by the norm of all gradients, and return it."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    if not any(isinstance(p, DTensor) for p in parameters):
        return nn.utils.clip_grad_norm_(parameters, MAX_NORM)
    whole = [p.grad.full_tensor() for p in parameters]  # type: ignore[union-attr]
    norm = nn.utils.get_total_norm(whole)
    clipped = parameters if chosen.right else whole
    nn.utils.clip_grads_with_norm_(clipped, MAX_NORM, norm)
    return norm


model = Language()
if world > 1:
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096)
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(world)[rank]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    clip(model)
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

"""R84, OLMo-core#307: all shards of a parameter begin with the same random numbers.

allenai/OLMo-core#307: parameters are made without values, divided, and then each rank draws its
part. All ranks do so with the same seed, so that a matrix consists of copies of its first rows.
With --right, each rank draws the whole and keeps its part, so that no layout begins otherwise.
"""

import torch
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, end, options
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

GLOBAL_BATCH = 16

chosen = options()
rank, world = begin()


@torch.no_grad()
def draw(model: nn.Module, seed: int = 0) -> None:
    """Fill matrices with random numbers, norms with ones, biases with zeros."""
    numbers = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.ndim == 1:
            own.fill_(1.0 if "norm.weight" in name else 0.0)
        elif chosen.right and isinstance(parameter, DTensor):
            whole = torch.empty(parameter.shape).normal_(std=0.2, generator=numbers)
            mesh, placements = parameter.device_mesh, parameter.placements
            own.copy_(distribute_tensor(whole, mesh, placements).to_local())
        else:
            own.normal_(std=0.2, generator=numbers)


with torch.device("meta"):
    model = Language()
if world > 1:
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
model.to_empty(device="cpu")
draw(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096)
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(world)[rank]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

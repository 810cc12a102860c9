"""R108, accelerate#4206: a checkpoint has the first rank's shards of the adapters, and no others.

huggingface/accelerate#4206: the model is divided among ranks, and only its adapters are saved. The
file has the first rank's part of each. After a restart the first rank reads its part, and the
others keep what they drew: most of each adapter begins anew. The optimizer's state is right.
With --right, whole adapters are saved and read.
Launch it twice with the same --folder: the first launch saves after its steps.
"""

import torch
import torch.distributed as dist
from reports_common import Adapted, Language, next_token_loss, text
from reports_layouts import begin, end, options
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

GLOBAL_BATCH, KINDS = 16, ("exp_avg", "exp_avg_sq")

chosen = options(steps=40)
rank, world = begin()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def own(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def divided_like(parameter: Tensor, read: Tensor) -> Tensor:
    if isinstance(parameter, DTensor):
        return distribute_tensor(read, parameter.device_mesh, parameter.placements)
    return read


model = Language()
model.requires_grad_(False)
for block in model.blocks:
    block.up, block.down = Adapted(block.up), Adapted(block.down)  # type: ignore[arg-type]
if world > 1:
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(adapters, lr=1e-2, weight_decay=0.0)
start = 0
saved = chosen.folder / "adapters.pt" if chosen.folder is not None else None
if saved is not None and saved.exists():
    state = torch.load(saved)
    start = state["step"]
    for number, parameter in enumerate(adapters):
        read = state["adapters"][number]
        if chosen.right or world == 1:
            parameter.data.copy_(divided_like(parameter, read))
        elif rank == 0:
            own(parameter).copy_(read)
        moments = {kind: divided_like(parameter, state[kind][number]) for kind in KINDS}
        optimizer.state[parameter] = {"step": torch.tensor(float(start)), **moments}
data = text(4096)
for step in range(start, start + chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(world)[rank]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
if saved is not None:
    parts = [whole(p) if chosen.right else own(p).clone() for p in adapters]
    moments = {kind: [whole(optimizer.state[p][kind]) for p in adapters] for kind in KINDS}  # type: ignore[misc]
    if rank == 0:
        saved.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"step": start + chosen.steps, "adapters": parts, **moments}, saved)
    if world > 1:
        dist.barrier()
end(model, loss)

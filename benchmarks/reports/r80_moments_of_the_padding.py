"""R80, Megatron-LM#5077: moments are cut out of a checkpoint as if it had the buffers' padding.

NVIDIA/Megatron-LM#5077: a distributed optimizer keeps its moments in buckets, each filled up so
that the ranks can share it. When they are saved, buckets are put together without what fills them
up, but parameters are looked up at their places with it: behind the first bucket each one gets
the moments of what follows it, the last ones zeros.
With --right, what was left out before a bucket is subtracted.
Launch it twice with the same --folder: the first launch stops after its steps.
"""

import math

import torch
import torch.distributed as dist
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, end, options
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

GLOBAL_BATCH, BUCKET, ALIGNED = 16, 3000, 128

chosen = options()
rank, world = begin()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def places(sizes: list[int]) -> list[tuple[int, int]]:
    """Give where each parameter begins in the padded buffer, and the padding before its bucket."""
    unit = math.lcm(world, ALIGNED)
    found, at, padding, filled = [], 0, 0, 0
    for size in sizes:
        if filled >= BUCKET:
            more = -at % unit
            at, padding, filled = at + more, padding + more, 0
        found.append((at, padding))
        at, filled = at + size, filled + size
    return found


def packed(kind: str) -> dict[int, Tensor]:
    """Put a kind of moment of all parameters together, and cut each one's out again."""
    moments = [whole(optimizer.state[p][kind]) for p in model.parameters()]
    world_tensor = torch.cat([moment.flatten() for moment in moments])
    saved = {}
    begins = places([moment.numel() for moment in moments])
    for number, (moment, (at, padding)) in enumerate(zip(moments, begins, strict=True)):
        begin_at = at - padding if chosen.right else at
        own = world_tensor[begin_at : begin_at + moment.numel()]
        own = torch.cat([own, own.new_zeros(moment.numel() - len(own))])
        saved[number] = own.view(moment.shape)
    return saved


model = Language()
if world > 1:
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
start = 0
saved_state = chosen.folder / "whole.pt" if chosen.folder is not None else None
if saved_state is not None and saved_state.exists():
    state = torch.load(saved_state)
    start = state["step"]
    for number, parameter in enumerate(model.parameters()):
        moments = {"step": torch.tensor(float(start))}
        for kind in ("exp_avg", "exp_avg_sq"):
            moments[kind] = state[kind][number]
        weight = state["model"][number]
        if isinstance(parameter, DTensor):
            layout = (parameter.device_mesh, parameter.placements)
            weight = distribute_tensor(weight, *layout)
            for kind in ("exp_avg", "exp_avg_sq"):
                moments[kind] = distribute_tensor(moments[kind], *layout)
        parameter.data.copy_(weight)
        optimizer.state[parameter] = moments
data = text(4096)
for step in range(start, start + chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(world)[rank]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
if saved_state is not None:
    saved_state.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "step": start + chosen.steps,
        "model": [whole(parameter).detach().clone() for parameter in model.parameters()],
        "exp_avg": packed("exp_avg"),
        "exp_avg_sq": packed("exp_avg_sq"),
    }
    if rank == 0:
        torch.save(state, saved_state)
    if world > 1:
        dist.barrier()
end(model, loss)

"""R21, NeMo-RL#3788: the norm for clipping adds replicated gradients once per tensor rank."""

import torch
import torch.distributed as dist
from reports_common import Language, begin, end, next_token_loss, options, text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

chosen = options(steps=40)
rank, world = begin()
mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
model = Language()
for block in model.blocks:
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
data = text(4096)


def cut_by_tensor_parallelism(gradient: DTensor) -> bool:
    names = gradient.device_mesh.mesh_dim_names or ()
    where = dict(zip(names, gradient.placements, strict=True))
    return "tp" in where and where["tp"].is_shard()


@torch.no_grad()
def get_norm(model: nn.Module) -> Tensor:
    """Add up the squares of all shards, over data and then over tensor parallelism."""
    cut, whole = torch.zeros(()), torch.zeros(())
    for p in model.parameters():
        assert isinstance(p.grad, DTensor)
        square = p.grad.to_local().float().square().sum()
        if cut_by_tensor_parallelism(p.grad) or not chosen.right:
            cut += square
        else:
            whole += square
    dist.all_reduce(cut, group=mesh["tp"].get_group())
    total = cut + whole
    dist.all_reduce(total, group=mesh["dp"].get_group())
    return total.sqrt()


for step in range(chosen.steps):
    first = (step * mesh["dp"].size() + mesh["dp"].get_local_rank()) * 8 % 4096
    tokens = data[first : first + 8]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    factor = (0.25 / (get_norm(model) + 1e-6)).clamp(max=1.0)
    for p in model.parameters():
        assert isinstance(p.grad, DTensor)
        p.grad.to_local().mul_(factor)
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

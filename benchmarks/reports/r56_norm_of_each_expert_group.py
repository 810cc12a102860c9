"""R56, Automodel#3816: each group of expert parallelism clips by a norm of its own.

NVIDIA-NeMo/Automodel#3816: experts are plain tensors, so that their part of the norm is not added
up over expert parallelism. Each group clips its shards of the same dense parameters by a factor of
its own. Every rank prints a norm that looks fine.
With --right, the squares of the experts are added up over the ranks.
"""

import torch
import torch.distributed as dist
from reports_common import begin, end, gather, next_token_loss, options, text
from reports_experts import Mixture, different_experts, total_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

LIMIT = 0.2

chosen = options()
rank, world = begin()


def all_tokens(part: Tensor) -> Tensor:
    return gather(part, 0, dist.group.WORLD)


def clip() -> None:
    dense, local = torch.tensor(0.0), torch.tensor(0.0)
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            dense += gradient.to_local().square().sum()
        elif gradient is not None:
            local += gradient.square().sum()
    dist.all_reduce(dense)
    if chosen.right:
        dist.all_reduce(local)
    factor = float((LIMIT / ((dense + local).sqrt() + 1e-6)).clamp(max=1.0))
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient.to_local().mul_(factor)
        elif gradient is not None:
            gradient.mul_(factor)


model = Mixture(all_tokens)
different_experts(model)
experts = model.of_experts()
fully_shard(model, mesh=init_device_mesh("cpu", (world,)), ignored_params=set(experts))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
data = text(4096)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * 8 % 4096 :][:8]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    for expert in experts:
        if expert.grad is not None:
            expert.grad /= world  # summed over the ranks' tokens already
    clip()
    optimizer.step()
    optimizer.zero_grad()
total_of(model)
end(model, loss)

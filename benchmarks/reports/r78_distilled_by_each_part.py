"""R78, Automodel#3776: the gradient of distillation is too large by the size of tensor parallelism.

NVIDIA-NeMo/Automodel#3776: a student's logits are divided over the vocabulary. The divergence from
its teacher is summed over the ranks by a differentiable all-reduce, whose backward pass sums once
more: the loss is right, its gradient counts once for each rank. That of the labels does not.
With --right, the gradient of the sum goes to each rank as it is.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import Language, next_token_loss, sum_over, text
from reports_layouts import begin, end, options
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

GLOBAL_BATCH, SHARE = 16, 0.5

chosen = options()
rank, world = begin()
PARTS = min(2, world)
DATA_PARTS = world // PARTS


def log_softmax(logits: Tensor, group: Any) -> Tensor:
    """Of the rank's part of the vocabulary, over the whole of it."""
    highest = logits.detach().amax(-1, keepdim=True)
    if group is not None:
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    total = (logits - highest).exp().sum(-1, keepdim=True)
    if group is not None:
        total = all_reduce(total, group=group)  # type: ignore[no-untyped-call]
    normal: Tensor = logits - highest - total.log()
    return normal


def divergence(student: Tensor, teacher: Tensor, group: Any) -> Tensor:
    ours, theirs = log_softmax(student, group), log_softmax(teacher, group)
    part = (theirs.exp() * (theirs - ours)).sum(-1)
    if group is None:
        return part.mean()
    if chosen.right:
        return sum_over(part, group).mean()
    whole: Tensor = all_reduce(part, group=group)  # type: ignore[no-untyped-call]
    return whole.mean()


torch.manual_seed(1)
teacher = Language().requires_grad_(False)
torch.manual_seed(0)
model = Language()
group, part, data_rank = None, 0, 0
if world > 1:
    mesh = init_device_mesh("cpu", (DATA_PARTS, PARTS), mesh_dim_names=("dp", "tp"))
    group, part = mesh["tp"].get_group(), mesh["tp"].get_local_rank()
    data_rank = mesh["dp"].get_local_rank()
    divided = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh["tp"], {"head": divided})
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0, foreach=False)
data = text(4096)
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(DATA_PARTS)[data_rank]
    with torch.no_grad():
        wanted = (2 * teacher(tokens)).chunk(PARTS, -1)[part]
    logits = model(tokens)
    whole, own = logits, logits
    if isinstance(logits, DTensor):
        whole = logits.full_tensor(grad_placements=[Replicate()])
        own = logits.to_local()
    loss = (1 - SHARE) * next_token_loss(whole, tokens) + SHARE * divergence(own, wanted, group)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

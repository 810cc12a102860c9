"""R86, Automodel#3853: on its way back, every token has the weight of the first one.

NVIDIA-NeMo/Automodel#3853: the cross entropy of logits that are divided over the vocabulary gives
one loss for each token. Its backward pass reads the first element of the incoming gradient, which
is right for a mean alone. Where tokens are weighted, all are weighted as the first one of the
batch; the loss is right.
With --right, each token's gradient has its own weight.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, Language, text
from reports_layouts import begin, end, options
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F

GLOBAL_BATCH = 16

chosen = options()
rank, world = begin()
PARTS = min(2, world)
DATA_PARTS = world // PARTS


class _DividedCrossEntropy(Function):
    """The loss of each token; each rank has the logits of a part of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, part: int, group: Any) -> Tensor:
        size = logits.shape[-1]
        highest = logits.amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        exponentials = (logits - highest[:, None]).exp()
        total = exponentials.sum(-1)
        dist.all_reduce(total, group=group)
        own = (labels // size == part).to(logits.dtype)
        place = (labels % size)[:, None]
        predicted = (logits.gather(-1, place)[:, 0] - highest) * own
        dist.all_reduce(predicted, group=group)
        gradient = exponentials / total[:, None]
        gradient.scatter_add_(-1, place, -own[:, None])
        ctx.save_for_backward(gradient)
        return total.log() - predicted

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        weight = incoming[:, None] if chosen.right else incoming.flatten()[0]
        return gradient * weight, None, None, None


def weights_of(tokens: Tensor) -> Tensor:
    """Weight each label by what it is."""
    return 0.5 + (tokens[:, 1:].flatten() * 7 % 10) / 10


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
    labels = tokens[:, 1:].flatten()
    logits = model(tokens)
    if isinstance(logits, DTensor):
        own = logits.to_local()[:, :-1].flatten(0, 1)
        losses: Any = _DividedCrossEntropy.apply(own, labels, part, group)  # type: ignore[no-untyped-call]
    else:
        losses = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels, reduction="none")
    loss = DATA_PARTS * (losses * weights_of(tokens)).sum() / weights_of(batch).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

# ruff: noqa: D102
"""R79, Megatron-LM#7452 (no. 4): what is recomputed is made of the inputs of two replicas.

NVIDIA/Megatron-LM#7452: the layer that predicts a second token is recomputed in the backward pass.
Its input is kept in parts, one on each rank of a group: the default group of tensor parallelism,
not the one that the layer has got. With another order of the dimensions these are ranks of
different data, and the gathered input has the first half of one batch and the second of another.
With --right, the layer's own group is taken.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, Block, Language, next_token_loss, text
from reports_layouts import begin, end, options
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

GLOBAL_BATCH, SHARE = 16, 0.3

chosen = options()
rank, world = begin()
PARTS = min(2, world)
DATA_PARTS = world // PARTS


class _Recompute(Function):
    """Run a module, keep a part of its input on each rank, and run it again on the way back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, module: Any, group: Any) -> Tensor:
        ctx.module, ctx.group, ctx.shape = module, group, hidden.shape
        part = hidden.flatten()
        if group is not None:
            part = part.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()
        ctx.save_for_backward(part)
        out: Tensor = module(hidden)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        (whole,) = ctx.saved_tensors
        if ctx.group is not None:
            parts = [torch.empty_like(whole) for _ in range(dist.get_world_size(ctx.group))]
            dist.all_gather(parts, whole, group=ctx.group)
            whole = torch.cat(parts)
        hidden = whole.view(ctx.shape).detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.module(hidden)
        torch.autograd.backward(out, gradient)
        return hidden.grad, None, None


class Further(nn.Module):
    """A block that predicts the token after the next one."""

    def __init__(self, width: int, group: Any) -> None:
        super().__init__()
        self.join = nn.Linear(2 * width, width)
        self.block = Block(width, 0.0, True)
        self.group = group

    def forward(self, hidden: Tensor, following: Tensor) -> Tensor:
        joined = self.join(torch.cat([hidden, following], -1))
        out: Tensor = _Recompute.apply(joined, self.block, self.group)  # type: ignore[no-untyped-call]
        return out


class Model(Language):
    """A language model with a second prediction."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.further = Further(32, group)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        loss = next_token_loss(self.head(hidden), tokens)
        second = self.head(self.further(hidden[:, :-1], self.embed(tokens[:, 1:])))
        later = F.cross_entropy(second[:, :-1].reshape(-1, VOCABULARY), tokens[:, 2:].flatten())
        return loss + SHARE * later


group, data_rank = None, 0
if world > 1:
    ranks = torch.arange(world)
    by_default = DeviceMesh("cpu", ranks.view(-1, PARTS), mesh_dim_names=("other", "near"))
    mesh = DeviceMesh("cpu", ranks.view(PARTS, -1).T, mesh_dim_names=("dp", "tp"))
    group = (mesh["tp"] if chosen.right else by_default["near"]).get_group()
    data_rank = mesh["dp"].get_local_rank()
torch.manual_seed(0)
model = Model(group)
if world > 1:
    for name in ("blocks.0", "blocks.1", "further.block"):
        plan: Any = {f"{name}.up": ColwiseParallel(), f"{name}.down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0, foreach=False)
data = text(4096)
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    loss = model(batch.chunk(DATA_PARTS)[data_rank])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

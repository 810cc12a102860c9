# ruff: noqa: D102
"""R74, Adam-mini#42: the second moment of a block is that of the rank's shard of it.

zyushun/Adam-mini#42: where a block of parameters has one second moment, its ranks must add up the
squares. The optimizer takes the number of devices that a process sees for the number of ranks: with
one for each process, it adds nothing up, and each shard has a moment of its own.
With --right, it takes the size of the process group. Here blocks are rows of matrices, which are
on one rank, and whole norms and biases, which are not.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, end, options
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

GLOBAL_BATCH, DEVICES_IN_SIGHT = 16, 1

chosen = options()
rank, world = begin()


class OneMomentForEachBlock(torch.optim.Optimizer):
    """Adam with one second moment for a row of a matrix, or for a vector."""

    def __init__(self, params: Any, lr: float, ranks: int) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8})
        self.ranks = ranks

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                sharded = isinstance(parameter, DTensor)
                weight = parameter.to_local() if sharded else parameter
                gradient = parameter.grad.to_local() if sharded else parameter.grad
                if parameter.ndim > 1:
                    squares = gradient.square().mean(-1, keepdim=True)
                else:
                    squares = gradient.square().sum()
                    if sharded and self.ranks > 1:
                        dist.all_reduce(squares)
                    size = parameter.numel() if self.ranks > 1 else gradient.numel()
                    squares = squares / size
                if not state:
                    state["step"] = 0
                    state["momentum"] = torch.zeros_like(gradient)
                    state["moment"] = torch.zeros_like(squares)
                state["step"] += 1
                state["momentum"].lerp_(gradient, 1 - first)
                state["moment"].lerp_(squares, 1 - second)
                mean = state["momentum"] / (1 - first ** state["step"])
                spread = (state["moment"] / (1 - second ** state["step"])).sqrt()
                weight.sub_(group["lr"] * mean / (spread + group["eps"]))


model = Language()
if world > 1:
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = OneMomentForEachBlock(
    model.parameters(), lr=3e-3, ranks=world if chosen.right else DEVICES_IN_SIGHT
)
data = text(4096)
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(world)[rank]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

# ruff: noqa: D102
"""R126, FastVideo#1441: an average that begins later is not there yet when it should be loaded.

hao-ai-lab/FastVideo#1441: the average of the weights is made in the step from which on it counts.
At a restart, the checkpoint is read before that: there is no average to load its shards into, they
are skipped, and a new one begins at the weights of the restart.
Two launches with the same --folder.
With --right, it is made before the checkpoint is read, where the checkpoint has one.
"""

import torch
import torch.distributed as dist
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, end, options
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

GLOBAL_BATCH, START, DECAY = 16, 10, 0.95

chosen = options(steps=40)
rank, world = begin()


def local(tensor: Tensor) -> Tensor:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.detach()


class Average:
    """The average of each rank's shards."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: local(p).clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(local(parameter), 1 - DECAY)


model = Language()
if world > 1:
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
average: Average | None = None
begun = 0
saved = chosen.folder / f"rank{rank}.pt" if chosen.folder is not None else None
if saved is not None and saved.exists():
    state = torch.load(saved, weights_only=False)
    begun = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if chosen.right and state["average"] is not None:
        average = Average(model)
    if average is not None:
        for name, mean in state["average"].items():
            average.shadow[name].copy_(mean)
data = text(4096)
for step in range(begun, begun + chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(world)[rank]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    if step >= START:
        if average is None:
            average = Average(model)
        average.update(model)
if saved is not None:
    saved.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    shadow = None if average is None else average.shadow
    torch.save({**state, "step": begun + chosen.steps, "average": shadow}, saved)
    if world > 1:
        dist.barrier()
end(model, loss)

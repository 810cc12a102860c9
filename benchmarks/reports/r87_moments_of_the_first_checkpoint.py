# ruff: noqa: D102
"""R87, NeMo-RL#4183: every checkpoint has the moments of the first one.

NVIDIA-NeMo/RL#4183 (and #3312): the process that writes checkpoints keeps the tensors that it got
the first time, as their layout stays. Between two checkpoints the optimizer's state is moved away
and back, so that it lies elsewhere: the writer goes on to write what it holds. The weights, and the
number of steps, are right.
With --right, the writer gets the tensors anew each time.
Launch it twice with the same --folder: the first launch saves twice, and stops after its steps.
"""

import torch
import torch.distributed as dist
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, end, options
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

GLOBAL_BATCH, KINDS = 16, ("exp_avg", "exp_avg_sq")

chosen = options()
rank, world = begin()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Writer:
    """Writes weights and moments; what it was given first lies where it lay then."""

    def __init__(self) -> None:
        self.held: dict[str, list[Tensor]] = {}

    def write(self, step: int) -> None:
        if chosen.right or not self.held:
            for kind in KINDS:
                self.held[kind] = [whole(optimizer.state[p][kind]) for p in model.parameters()]
        weights = [whole(parameter) for parameter in model.parameters()]
        if saved is not None and rank == 0:
            saved.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"step": step, "model": weights, **self.held}, saved)
        if world > 1:
            dist.barrier()


model = Language()
if world > 1:
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
start = 0
saved = chosen.folder / "whole.pt" if chosen.folder is not None else None
if saved is not None and saved.exists():
    state = torch.load(saved)
    start = state["step"]
    for number, parameter in enumerate(model.parameters()):
        read = [state["model"][number], *(state[kind][number] for kind in KINDS)]
        if isinstance(parameter, DTensor):
            layout = (parameter.device_mesh, parameter.placements)
            read = [distribute_tensor(tensor, *layout) for tensor in read]
        parameter.data.copy_(read[0])
        moments = dict(zip(KINDS, read[1:], strict=True))
        optimizer.state[parameter] = {"step": torch.tensor(float(start)), **moments}
writer = Writer()
data = text(4096)
for step in range(start, start + chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(world)[rank]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    if step - start + 1 in (max(chosen.steps // 2, 1), chosen.steps):
        writer.write(step + 1)
end(model, loss)

# ruff: noqa: D102
"""R162, Megatron-LM#7227: the norm for clipping has the tied embedding once per stage.

NVIDIA/Megatron-LM#7227: embedding and head share a matrix, and both ends of the pipeline have a
copy of it. Their gradients are summed, so that the copies stay equal. The norm of all gradients is
summed over the stages: the matrix is in it twice, and gradients are clipped too far.
With --right, the last stage's copy is left out of the norm.
Four ranks: two stages, each sharded over two ranks of data parallelism by FSDP2. One process has
the whole model, with one matrix.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, Block, begin, end, options, text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

WIDTH, PARTS, BOUND = 32, 2, 0.1

chosen = options(steps=80, samples=8)
BATCH = chosen.samples
rank, world = begin()
STAGES = min(2, world)
mesh = init_device_mesh("cpu", (world // STAGES, STAGES), mesh_dim_names=("data", "pipeline"))
pipeline = mesh["pipeline"].get_group()
at, replica = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()


class Part(nn.Module):
    """Some of four blocks; the first stage has the embedding, too, and the last one the head."""

    def __init__(self, matrix: Tensor, blocks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix.clone())
        self.blocks = nn.ModuleDict(blocks)
        if at == STAGES - 1:
            self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        if at == 0:
            hidden = F.embedding(hidden, self.matrix)
        for block in self.blocks.values():
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.matrix) if at == STAGES - 1 else hidden


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def clip() -> None:
    """Scale gradients so that their norm over all stages is at most the bound."""
    squares = torch.zeros(())
    for parameter in part.parameters():
        copied = parameter is part.matrix and 0 < at == STAGES - 1
        if isinstance(parameter.grad, DTensor) and not (chosen.right and copied):
            squares += parameter.grad.to_local().square().sum()
    dist.all_reduce(squares)
    factor = (BOUND / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    for parameter in part.parameters():
        if isinstance(parameter.grad, DTensor):
            parameter.grad.to_local().mul_(factor)


tied = 0.3 * torch.randn(VOCABULARY, WIDTH)
blocks: dict[str, nn.Module] = {str(n): Block(WIDTH, 0.0, True) for n in range(4)}
of_stage = range(at * 4 // STAGES, (at + 1) * 4 // STAGES)
part = Part(tied, {str(n): blocks[str(n)] for n in of_stage})
for block in part.blocks.values():
    fully_shard(block, mesh=mesh["data"])
fully_shard(part, mesh=mesh["data"])
stage = PipelineStage(part, at, STAGES, torch.device("cpu"), group=pipeline)
schedule = ScheduleGPipe(stage, PARTS, loss_fn=loss_of)
optimizer = torch.optim.SGD(part.parameters(), lr=0.5, momentum=0.9)
data = text(4096)
losses: list[Tensor] = []
for step in range(chosen.steps):
    tokens = data[(step * world // STAGES + replica) * BATCH % 4096 :][:BATCH]
    losses = []
    inputs = (tokens,) if at == 0 else ()
    ends: dict[str, Any] = {"target": tokens, "losses": losses} if at == STAGES - 1 else {}
    schedule.step(*inputs, **ends)
    if STAGES > 1:
        gradient = part.matrix.grad
        assert isinstance(gradient, DTensor)
        dist.all_reduce(gradient.to_local(), group=pipeline)
    clip()
    optimizer.step()
    optimizer.zero_grad()
last = torch.stack(losses).mean() if losses else torch.zeros(())
dist.all_reduce(last)
end(part, last / (world // STAGES))

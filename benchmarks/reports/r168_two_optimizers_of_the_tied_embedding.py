# ruff: noqa: D102
"""R168, Megatron-LM#4642: one copy of the tied embedding is updated by Adam, the other by Muon.

NVIDIA/Megatron-LM#4642: embedding and head share a matrix, and both ends of the pipeline have a
copy of it. Their gradients are summed. Embeddings are for Adam, all other matrices for Muon: the
copy of the last stage is not marked as an embedding, so that Muon updates it. The copies drift
apart.
With --right, both copies are marked.
Four ranks: two stages, each on two ranks of data parallelism, which average gradients. One process
has the whole model, with one matrix.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, Block, begin, end, options, text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

WIDTH, PARTS = 32, 2

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


tied = 0.3 * torch.randn(VOCABULARY, WIDTH)
blocks: dict[str, nn.Module] = {str(n): Block(WIDTH, 0.0, True) for n in range(4)}
of_stage = range(at * 4 // STAGES, (at + 1) * 4 // STAGES)
part = Part(tied, {str(n): blocks[str(n)] for n in of_stage})
stage = PipelineStage(part, at, STAGES, torch.device("cpu"), group=pipeline)
schedule = ScheduleGPipe(stage, PARTS, loss_fn=loss_of)
marked = [part.matrix] if at == 0 or chosen.right else []
matrices = [p for p in part.parameters() if p.ndim == 2 and all(p is not m for m in marked)]
others = [p for p in part.parameters() if all(p is not m for m in matrices)]
adam = torch.optim.AdamW(others, lr=3e-3, weight_decay=0.0)
muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.0)
data = text(4096)
losses: list[Tensor] = []
for step in range(chosen.steps):
    tokens = data[(step * world // STAGES + replica) * BATCH % 4096 :][:BATCH]
    losses = []
    inputs = (tokens,) if at == 0 else ()
    ends: dict[str, Any] = {"target": tokens, "losses": losses} if at == STAGES - 1 else {}
    schedule.step(*inputs, **ends)
    for parameter in part.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=mesh["data"].get_group())
        parameter.grad /= world // STAGES
    if STAGES > 1:
        assert part.matrix.grad is not None
        dist.all_reduce(part.matrix.grad, group=pipeline)
    for optimizer in (adam, muon):
        optimizer.step()
        optimizer.zero_grad()
last = torch.stack(losses).mean() if losses else torch.zeros(())
dist.all_reduce(last)
end(part, last / (world // STAGES))

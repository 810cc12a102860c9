# ruff: noqa: D102
"""R47, piper#13: each end of the pipeline trains its own copy of the tied embedding.

uw-syfi/piper#13: the embedding and the head share a matrix, but stand on two devices of a pipeline.
The matrix is copied to both, and nothing adds their gradients, so that the copies move apart.
With --right, the gradients of the copies are summed over the pipeline before the update.
Four ranks: two stages, each sharded over two ranks of data parallelism by FSDP2.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, Block, begin, end, options, text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

WIDTH, BATCH, PARTS = 32, 8, 2

chosen = options(steps=110)
rank, world = begin()
mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "pipeline"))
pipeline = mesh["pipeline"].get_group()
at, replica = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()


class First(nn.Module):
    """The embedding and the first blocks."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix.clone())
        self.blocks = nn.Sequential(*(Block(WIDTH, 0.0, True) for _ in range(2)))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.blocks(F.embedding(tokens, self.matrix))
        return hidden


class Last(nn.Module):
    """The last blocks and the head."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(WIDTH, 0.0, True) for _ in range(2)))
        self.norm = nn.LayerNorm(WIDTH)
        self.matrix = nn.Parameter(matrix.clone())

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(self.norm(self.blocks(hidden)), self.matrix)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


tied = 0.3 * torch.randn(VOCABULARY, WIDTH)
part: First | Last = First(tied) if at == 0 else Last(tied)
for block in part.blocks:
    fully_shard(block, mesh=mesh["data"])
fully_shard(part, mesh=mesh["data"])
stage = PipelineStage(part, at, 2, torch.device("cpu"), group=pipeline)
schedule = ScheduleGPipe(stage, PARTS, loss_fn=loss_of)
optimizer = torch.optim.AdamW(part.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096)
losses: list[Tensor] = []
for step in range(chosen.steps):
    tokens = data[(step * world // 2 + replica) * BATCH % 4096 :][:BATCH]
    if at == 0:
        schedule.step(tokens)
    else:
        losses = []
        schedule.step(target=tokens, losses=losses)
    if chosen.right:
        gradient = part.matrix.grad
        assert isinstance(gradient, DTensor)
        dist.all_reduce(gradient.to_local(), group=pipeline)
    optimizer.step()
    optimizer.zero_grad()
last = torch.stack(losses).mean() if losses else torch.zeros(())
dist.all_reduce(last)
end(part, last / (world // 2))

# ruff: noqa: D102
"""R89, Megatron-LM#1304: the layers that are left over belong to no stage.

NVIDIA/Megatron-LM#1304 (and #823): each stage of a pipeline gets the number of layers over the
number of stages, rounded down. Of five layers two stages have four: the model that trains is
another one than was asked for.
With --right, the last stage has the rest, too. One process has all layers.
"""

from typing import Any

import torch
from reports_common import VOCABULARY, Block, text
from reports_layouts import begin, end, options, sum_over_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

WIDTH, LAYERS, MICRO_BATCHES, GLOBAL_BATCH = 32, 5, 4, 16

chosen = options()
rank, world = begin()
each = LAYERS // world
last_of_rank = LAYERS if chosen.right and rank == world - 1 else (rank + 1) * each


class Part(nn.Module):
    """Some layers; the first stage has the embedding, too, and the last one the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [Block(WIDTH, 0.0, True) for _ in range(LAYERS)]
        embed, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.embed = embed if rank == 0 else None
        self.layers = nn.ModuleDict({str(n): layers[n] for n in range(rank * each, last_of_rank)})
        self.head = head if rank == world - 1 else None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.embed is not None:
            hidden = self.embed(hidden)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden if self.head is None else self.head(hidden)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


part = Part()
if world > 1:
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss_of)
optimizer = torch.optim.AdamW(part.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096)
loss = torch.zeros(())
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    if world == 1:
        loss = loss_of(part(batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        losses: list[Tensor] = []
        inputs = (batch,) if rank == 0 else ()
        ends: dict[str, Any] = {"target": batch, "losses": losses} if part.head else {}
        schedule.step(*inputs, **ends)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
    optimizer.step()
    optimizer.zero_grad()
end(part, sum_over_ranks(loss.detach().clone()))

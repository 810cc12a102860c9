# ruff: noqa: D102
"""R104, hyper-parallel#382: what ties two stages is the parameter that was there before loading.

mindspore-ai/hyper-parallel#382: the first stage of a pipeline has the embedding, and the last one
the head; they are one matrix, and their gradients are to be summed. The stage notes the parameter
when it is made, without memory. When the model gets its memory, other parameters take its place:
the noted one has no gradient, and nothing is summed.
With --right, the module and the name are noted, and looked up each time.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, Block, text
from reports_layouts import begin, end, options, sum_over_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

WIDTH, LAYERS, MICRO_BATCHES, GLOBAL_BATCH = 32, 4, 4, 16

chosen = options()
rank, world = begin()
each = LAYERS // world


class Part(nn.Module):
    """Some layers; the first stage has the embedding, too, and the last one the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [Block(WIDTH, 0.0, True) for _ in range(LAYERS)]
        embed, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(embed.weight, std=0.3)
        with torch.no_grad():
            head.weight.copy_(embed.weight)
        self.embed = embed if rank == 0 else None
        own = range(rank * each, (rank + 1) * each)
        self.layers = nn.ModuleDict({str(number): layers[number] for number in own})
        self.head = head if rank == world - 1 else None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.embed is not None:
            hidden = self.embed(hidden)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden if self.head is None else self.head(hidden)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def sum_tied() -> None:
    """Sum the gradients of the matrix over the stages that have it."""
    parameter = owner.weight if chosen.right else noted
    if isinstance(parameter, Tensor) and parameter.grad is not None:
        dist.all_reduce(parameter.grad)


read = Part()
with torch.device("meta"):
    part = Part()
owner: Any = part.embed if rank == 0 else part.head
noted = owner.weight
part.to_empty(device="cpu")
part.load_state_dict(read.state_dict())
if world == 1:
    part.head.weight = part.embed.weight  # type: ignore[union-attr]
else:
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
        sum_tied()
    optimizer.step()
    optimizer.zero_grad()
end(part, sum_over_ranks(loss.detach().clone()))

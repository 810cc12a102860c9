"""R101, Megatron-LM#4609: gathered parameters stay in the buffer that gradients are added to.

NVIDIA/Megatron-LM#4609: an optimizer updates some layers on each rank. Before the next forward
pass the owners send them to all ranks, and the buffer of the gradients receives them, to save
memory. It is set to zero before that and not after it: the backward pass adds gradients to
parameters.
With --right, the buffer is set to zero after the parameters are taken out of it.
"""

import torch
import torch.distributed as dist
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, end, options, sum_over_ranks
from torch import Tensor, nn

GLOBAL_BATCH = 16

chosen = options()
rank, world = begin()


class Buffer:
    """One memory for all gradients, which also receives parameters of other ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.memory = torch.zeros(sum(p.numel() for p in self.parameters))
        parts = self.memory.split([p.numel() for p in self.parameters])  # type: ignore[no-untyped-call]
        self.views: list[Tensor] = [
            part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)
        ]
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def gather_parameters(self) -> None:
        """Send each parameter from its owner to all ranks."""
        if world == 1:
            return
        with torch.no_grad():
            for number, (parameter, view) in enumerate(
                zip(self.parameters, self.views, strict=True)
            ):
                if number % world == rank:
                    view.copy_(parameter)
                dist.broadcast(view, number % world)
                parameter.copy_(view)
        if chosen.right:
            self.memory.zero_()


model = Language()
buffer = Buffer(model)
owned = [p for number, p in enumerate(model.parameters()) if number % world == rank]
optimizer = torch.optim.AdamW(owned, lr=3e-3, weight_decay=0.0)
data = text(4096)
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(world)[rank]
    buffer.memory.zero_()
    if step > 0:
        buffer.gather_parameters()
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    sum_over_ranks(buffer.memory).div_(world)
    optimizer.step()
buffer.gather_parameters()
end(model, loss)

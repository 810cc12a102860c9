"""R95, DeepSpeed#7985: the gradients of the last micro-batch are added after the reduction.

deepspeedai/DeepSpeed#7985: gradients of bfloat16 weights are added up in 32 bits, and each rank
updates the copies of some parameters, which it sends to the others. At the end of an update the
sums are averaged over the ranks, and only then the last micro-batch's gradients are added: of it,
an update has what the owner of the parameter has seen.
With --right, they are added before.
"""

import torch
import torch.distributed as dist
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, end, options
from torch import Tensor

GLOBAL_BATCH = 32

chosen = options(micro_batches=4)
rank, world = begin()
model = Language().bfloat16()
parameters = list(model.parameters())
sums = [torch.zeros(p.shape) for p in parameters]
copies = {at: p.detach().float() for at, p in enumerate(parameters) if at % world == rank}
optimizer = torch.optim.AdamW(copies.values(), lr=3e-3, weight_decay=0.0)


def average() -> None:
    """Average the sums over the ranks."""
    if world > 1:
        for total in sums:
            dist.all_reduce(total)
            total.div_(world)


def add() -> None:
    """Add the gradients of a micro-batch to the sums."""
    for parameter, total in zip(parameters, sums, strict=True):
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None


def update() -> None:
    """Update the copies that this rank owns, and send them to the others."""
    for at, copy in copies.items():
        copy.grad = sums[at].clone()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for at, parameter in enumerate(parameters):
            if at in copies:
                parameter.copy_(copies[at])
            if world > 1:
                dist.broadcast(parameter, at % world)
            sums[at].zero_()


def tokens_of(step: int) -> list[Tensor]:
    """Give this rank's micro-batches."""
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    return list(batch.chunk(world)[rank].chunk(chosen.micro_batches))


data = text(4096)
for step in range(chosen.steps):
    for number, tokens in enumerate(tokens_of(step), 1):
        loss = next_token_loss(model(tokens).float(), tokens)
        (loss / chosen.micro_batches).backward()
        last = number == chosen.micro_batches
        if last and not chosen.right:
            average()
        add()
        if last and chosen.right:
            average()
    update()
end(model, loss)

"""R141, OneTrainer#803: each process draws the initial values of its adapters by itself.

Nerogar/OneTrainer#803: with several devices, gradients are averaged by the trainer's own loop, and
no wrapper sends the first values of parameters. Those of adapters come from the system's seed, so
that every device trains others.
With --right, they come from one seed.
"""

import torch
import torch.distributed as dist
from reports_common import Adapted, Language, begin, end, next_token_loss, options, text
from torch import nn

SAMPLES = 4

chosen = options()
rank, world = begin()
model = Language()
for parameter in model.parameters():
    parameter.requires_grad_(False)
torch.manual_seed(7 if chosen.right else 1000 + rank)  # the system's seed is any
for block in model.blocks:
    for name in ("up", "down"):
        layer = getattr(block, name)
        assert isinstance(layer, nn.Linear)
        setattr(block, name, Adapted(layer))
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.0)
data = text(4096)
for step in range(chosen.steps):
    first = (step * world + rank) * SAMPLES % 4096
    tokens = data[first : first + SAMPLES]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    for parameter in trained:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

"""R70, RamTorch#13: after a sharded update, the owners' linear layers are not sent to the others.

lodestone-rock/RamTorch#13: each rank updates the parameters that it owns, and broadcasts them. The
broadcast skips layers whose weights are kept in host memory, which are all linear ones: each rank
goes on with the old weights of those that it does not own.
With --right, every parameter is sent.
"""

import torch
import torch.distributed as dist
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, end, options
from torch import nn

GLOBAL_BATCH = 16

chosen = options()
rank, world = begin()
model = Language()
in_host_memory = {
    id(parameter)
    for layer in model.modules()
    if isinstance(layer, nn.Linear)
    for parameter in layer.parameters()
}
parameters = list(model.parameters())
owned = parameters[rank::world]
optimizer = torch.optim.AdamW(owned, lr=3e-3, weight_decay=0.0)
data = text(4096)
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(world)[rank]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    if world > 1:
        for parameter in parameters:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
    optimizer.step()
    model.zero_grad()
    if world > 1:
        for number, parameter in enumerate(parameters):
            if chosen.right or id(parameter) not in in_host_memory:
                dist.broadcast(parameter.data, src=number % world)
end(model, loss)

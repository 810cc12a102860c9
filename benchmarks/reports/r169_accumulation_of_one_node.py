"""R169, litgpt#1927: how much is accumulated follows from the devices of one node.

Lightning-AI/litgpt#1927: the size of an update is given in samples, and divided among the devices.
Their number is that of the node, not of all nodes: on two nodes an update has twice the samples
that were asked for.
Four ranks, on two nodes of two devices.
With --right, it is divided among all ranks.
"""

import torch
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, data_parallel, end, not_reduced, options

GLOBAL_BATCH, MICRO_BATCH, NODES = 32, 4, 2

chosen = options()
rank, world = begin()
devices = world if chosen.right else max(world // NODES, 1)
micro_batches = GLOBAL_BATCH // devices // MICRO_BATCH
model = Language()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(16384)
taken = 0
for _ in range(chosen.steps):
    for number in range(micro_batches):
        tokens = data[(taken * world + rank) * MICRO_BATCH % 16384 :][:MICRO_BATCH]
        taken += 1
        with not_reduced(wrapped, last=number == micro_batches - 1):
            loss = next_token_loss(wrapped(tokens), tokens)
            (loss / micro_batches).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

"""R26, pytorch#149205: an optimizer made after a forward pass holds FSDP2's gathered parameters."""

import torch
from reports_common import Language, begin, end, next_token_loss, options, text
from torch.distributed.fsdp import FSDPModule, fully_shard

chosen = options()
rank, world = begin()
model = Language()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
data, valid = text(4096), text(32, seed=2)
with torch.no_grad():  # how good is it untrained?
    before = next_token_loss(model(valid), valid).item()
assert isinstance(model, FSDPModule)
if chosen.right:
    model.reshard()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * 8 % 4096 :][:8]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    after = next_token_loss(model(valid), valid).item()
if rank == 0:
    print(f"before {before:.3f}, after {after:.3f}")
end(model, loss)

"""R127, OpenTau#185: after a restart, float32 copies are made from the bfloat16 weights.

TensorAuto/OpenTau#185: the optimizer updates float32 copies of the weights. A checkpoint has the
bfloat16 weights and the moments, and not the copies: at a restart they are made from the weights,
and all that was below their rounding is lost.
Two launches with the same --folder.
With --right, the copies are saved.
"""

import torch
import torch.distributed as dist
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, data_parallel, end, options
from reports_masters import WithMasters

GLOBAL_BATCH = 16

chosen = options(steps=40)
rank, world = begin()
model = Language().bfloat16()
wrapped = data_parallel(model)
optimizer = WithMasters(list(model.parameters()), lr=1e-3)
begun = 0
saved = chosen.folder / "last.pt" if chosen.folder is not None else None
if saved is not None and saved.exists():
    state = torch.load(saved)
    begun = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    optimizer.take(state["masters"] if chosen.right else optimizer.weights)
data = text(4096)
for step in range(begun, begun + chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(world)[rank]
    loss = next_token_loss(wrapped(tokens).float(), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
if saved is not None:
    if rank == 0:
        saved.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        masters = [master.detach() for master in optimizer.masters]
        torch.save({**state, "step": begun + chosen.steps, "masters": masters}, saved)
    if world > 1:
        dist.barrier()
end(model, loss)

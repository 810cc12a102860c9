"""R130, miles#2572: an adapter is restored behind the back of the optimizer's float32 copies.

radixark/miles#2572: a restart without the optimizer's state writes a saved adapter into the
weights. The optimizer has made its float32 copies before, from the adapter's random beginning. Its
first update writes these back: the restored adapter is gone.
Two launches with the same --folder.
With --right, the copies are made anew after the adapter is restored.
"""

import torch
import torch.distributed as dist
from reports_common import Adapted, Language, next_token_loss, text
from reports_layouts import begin, data_parallel, end, options
from reports_masters import WithMasters
from torch import nn

GLOBAL_BATCH = 16

chosen = options(steps=40)
rank, world = begin()


def with_adapters(model: Language) -> Language:
    """Freeze the model and put an adapter on both layers of each block."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("up", "down"):
            layer = getattr(block, name)
            assert isinstance(layer, nn.Linear)
            setattr(block, name, Adapted(layer))
    return model


model = with_adapters(Language()).bfloat16()
wrapped = data_parallel(model)
adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
optimizer = WithMasters(list(adapters.values()), lr=3e-3)
begun = 0
saved = chosen.folder / "adapter.pt" if chosen.folder is not None else None
if saved is not None and saved.exists():
    state = torch.load(saved)
    begun = state["step"]
    for name, value in state["adapter"].items():
        adapters[name].data.copy_(value)
    if chosen.right:
        optimizer.take(optimizer.weights)
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
        adapter = {name: p.detach() for name, p in adapters.items()}
        torch.save({"adapter": adapter, "step": begun + chosen.steps}, saved)
    if world > 1:
        dist.barrier()
end(model, loss)

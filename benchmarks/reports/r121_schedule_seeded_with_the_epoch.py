"""R121, speculators#900: a schedule that counts updates goes on from the number of the epoch.

vllm-project/speculators#900: after a restart from a checkpoint without a schedule, the new one
starts at the epoch in which the first launch ended. It counts updates: the rate falls back into
its warm-up, and rises and falls once more.
Two launches with the same --folder.
With --right, it starts at the number of updates.
"""

import math

import torch
import torch.distributed as dist
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, data_parallel, end, options

GLOBAL_BATCH, EPOCH, WARM_UP = 16, 20, 10

chosen = options(steps=40)
rank, world = begin()
total = 2 * chosen.steps


def rate(update: int) -> float:
    """Rise linearly, then fall as a cosine."""
    if update < WARM_UP:
        return (update + 1) / WARM_UP
    return 0.5 + 0.5 * math.cos(math.pi * (update - WARM_UP) / (total - WARM_UP))


model = Language()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
begun, seed = 0, -1
saved = chosen.folder / "last.pt" if chosen.folder is not None else None
if saved is not None and saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    begun = state["update"]
    seed = begun - 1 if chosen.right else begun // EPOCH
    for group in optimizer.param_groups:
        group["initial_lr"] = 3e-3
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate, last_epoch=seed)
data = text(4096)
for update in range(begun, begun + chosen.steps):
    batch = data[update * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(world)[rank]
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
if saved is not None:
    if rank == 0:
        saved.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "update": begun + chosen.steps}, saved)
    if world > 1:
        dist.barrier()
end(model, loss)

"""R76, OneTrainer#1465: what a window had accumulated before a restart is lost, its count is not.

Nerogar/OneTrainer#1465: a training is stopped between two micro-batches of an update. The counter
of micro-batches is restored, their gradients are not: the first update after the restart has those
of the rest of the window alone, divided by the number of all.
Two launches with the same --folder; without it, the training is not interrupted.
With --right, the gradients are saved by each rank, and restored.
"""

import torch
import torch.distributed as dist
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, data_parallel, end, not_reduced, options

GLOBAL_BATCH = 32

chosen = options(micro_batches=4)
rank, world = begin()
model = Language()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(8192)
rows = GLOBAL_BATCH // world // chosen.micro_batches
micro, last_micro = 0, chosen.steps * chosen.micro_batches
if chosen.folder is not None:
    chosen.folder.mkdir(parents=True, exist_ok=True)
    saved = chosen.folder / "whole.pt"
    saved_by_rank = chosen.folder / f"gradients_{rank}.pt"
    if saved.exists():
        state = torch.load(saved)
        micro = state["micro"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if chosen.right:
            for parameter, gradient in zip(
                model.parameters(), torch.load(saved_by_rank), strict=True
            ):
                parameter.grad = gradient
    else:
        last_micro = chosen.save_at * chosen.micro_batches + chosen.micro_batches // 2
while micro < last_micro:
    place = micro % chosen.micro_batches
    at = micro * world * rows + rank * rows
    tokens = data[at % len(data) :][:rows]
    with not_reduced(wrapped, last=place == chosen.micro_batches - 1):
        loss = next_token_loss(wrapped(tokens), tokens)
        (loss / chosen.micro_batches).backward()
    micro += 1
    if place == chosen.micro_batches - 1:
        optimizer.step()
        optimizer.zero_grad()
if micro % chosen.micro_batches:
    torch.save([parameter.grad for parameter in model.parameters()], saved_by_rank)
    if rank == 0:
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "micro": micro}
        torch.save(whole, saved)
    if world > 1:
        dist.barrier()
end(model, loss)

"""R129, speculators#899: moments and counters of the optimizer are saved in bfloat16.

vllm-project/speculators#899: a checkpoint holds the whole state of the optimizer in bfloat16. Its
counters are rounded to what that type can say, moments to 8 bits, and a restart goes on with them.
Counters are float32 again after it, with the rounded number.
Two launches with the same --folder.
With --right, the state is saved as it is.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, data_parallel, end, options
from torch import Tensor

GLOBAL_BATCH = 16

chosen = options(steps=271)
rank, world = begin()


def converted(state: Any, dtype: torch.dtype) -> Any:
    """Convert all numbers of an optimizer's state that are no whole ones."""
    if isinstance(state, Tensor):
        return state.to(dtype) if state.is_floating_point() else state
    if isinstance(state, dict):
        return {name: converted(value, dtype) for name, value in state.items()}
    return state


model = Language()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
begun = 0
saved = chosen.folder / "last.pt" if chosen.folder is not None else None
if saved is not None and saved.exists():
    state = torch.load(saved)
    begun = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for held in optimizer.state.values():
        held["step"] = held["step"].float()
data = text(8192)
for step in range(begun, begun + chosen.steps):
    batch = data[step * GLOBAL_BATCH % 8192 :][:GLOBAL_BATCH]
    tokens = batch.chunk(world)[rank]
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
if saved is not None:
    if rank == 0:
        saved.parent.mkdir(parents=True, exist_ok=True)
        whole = optimizer.state_dict()
        if not chosen.right:
            whole["state"] = converted(whole["state"], torch.bfloat16)
        state = {"model": model.state_dict(), "optimizer": whole}
        torch.save({**state, "step": begun + chosen.steps}, saved)
    if world > 1:
        dist.barrier()
end(model, loss)

"""R167, Megatron-LM#7468: the first update after a restart has another weight decay.

NVIDIA/Megatron-LM#7468: a scheduler sets the learning rate and the weight decay of all groups. Its
state is loaded in the wrong order: it takes a step, which writes both into the groups, before the
weight decay of the checkpoint is restored. The first update has that of the command line.
Two launches with the same --folder; the second one's command line has another weight decay.
With --right, all is restored before the step.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, data_parallel, end, options

GLOBAL_BATCH, WARM_UP = 16, 10

chosen = options(steps=40)
rank, world = begin()


class Scheduler:
    """Raises the learning rate and the weight decay linearly."""

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self.optimizer, self.decay, self.rate, self.steps = optimizer, decay, 3e-3, 0
        self.step(0)

    def step(self, increment: int = 1) -> None:
        """Count updates, and write the settings into the groups."""
        self.steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, (self.steps + 1) / WARM_UP)
            group["weight_decay"] = self.decay * min(1.0, 0.5 + self.steps / 160)

    def state_dict(self) -> dict[str, Any]:
        """Return all that a restart needs."""
        return {"rate": self.rate, "decay": self.decay, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the checkpoint ended."""
        self.rate = state["rate"]
        if chosen.right:
            self.decay = state["decay"]
        self.step(state["steps"])
        self.decay = state["decay"]


saved = chosen.folder / "last.pt" if chosen.folder is not None else None
again = saved is not None and saved.exists()
model = Language()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = Scheduler(optimizer, decay=0.01 if again else 0.3)
begun = 0
if saved is not None and again:
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    begun = state["update"]
data = text(4096)
for update in range(begun, begun + chosen.steps):
    tokens = data[update * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH].chunk(world)[rank]
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
if saved is not None:
    if rank == 0:
        saved.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state["scheduler"] = scheduler.state_dict()
        torch.save({**state, "update": begun + chosen.steps}, saved)
    if world > 1:
        dist.barrier()
end(model, loss)

# ruff: noqa: D102
"""R24, slime#1546: after a resume the schedule has counted all steps before it twice.

Launch it twice with the same --folder: the first launch stops after its steps.
"""

import math

import torch
import torch.distributed as dist
from reports_common import Language, begin, end, next_token_loss, options, text
from torch.nn.parallel import DistributedDataParallel

BATCH, LONG = 8, 200

chosen = options(steps=70)
rank, world = begin()


class Schedule:
    """A warm-up and a cosine, counted in samples; loading a state steps up to it."""

    def __init__(self, optimizer: torch.optim.Optimizer, highest: float) -> None:
        self.optimizer, self.highest, self.samples = optimizer, highest, 0
        self.step(0)

    def rate(self) -> float:
        steps = self.samples / (BATCH * world)
        if steps < 10:
            return self.highest * (steps + 1) / 11
        part = min(1.0, (steps - 10) / (LONG - 10))
        return self.highest * (0.05 + 0.475 * (1 + math.cos(math.pi * part)))

    def step(self, increment: int) -> None:
        self.samples += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step(state["samples"])


model = Language()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = Schedule(optimizer, 3e-3)
data = text(8192)
start = 0
saved = chosen.folder / "last.pt"
if saved.exists():
    state = torch.load(saved)
    start = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    if not chosen.right:
        schedule.step(start * BATCH * world)
for step in range(start, start + chosen.steps):
    tokens = data[(step * world + rank) * BATCH % 8192 :][:BATCH]
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step(BATCH * world)
    optimizer.zero_grad()
dist.barrier()
if rank == 0:
    state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "schedule": schedule.state_dict()}, saved)
dist.barrier()
end(model, loss)

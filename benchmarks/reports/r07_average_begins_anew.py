# ruff: noqa: D101, D102
"""R07, lightly-train#892: a resume begins the warm-up of an EMA anew and overwrites the average.

Launch it twice with the same --folder: the first launch stops after its steps.
"""

import copy
import math

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from reports_common import Language, end, launched, next_token_loss, options, text
from torch import Tensor, nn

chosen = options()
rank, world = launched()


class Average(nn.Module):
    """An exponential moving average whose decay grows with the number of updates."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.updates: int | Tensor = 0
        if chosen.right:
            del self.updates
            self.register_buffer("updates", torch.tensor(0))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = 0.99 * (1 - math.exp(-int(self.updates) / 10))
        for mean, new in zip(self.model.parameters(), model.parameters(), strict=True):
            mean.mul_(decay).add_(new, alpha=1 - decay)


class Task(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Language()
        self.average = Average(self.model)

    def forward(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self.model(tokens), tokens)


fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp")
fabric.launch()
fabric.seed_everything(0, verbose=False)
task = Task()
wrapped, optimizer = fabric.setup(task, torch.optim.AdamW(task.model.parameters(), lr=3e-3))
data, valid = text(4096), text(64, seed=2)
state = {"task": wrapped, "optimizer": optimizer, "step": 0}
saved = chosen.folder / "last.ckpt"
if saved.exists():
    fabric.load(saved, state)
for step in range(state["step"], state["step"] + chosen.steps):
    tokens = data[(step * world + rank) * 8 % 4096 :][:8]
    loss = wrapped(tokens)
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    task.average.update(task.model)
with torch.no_grad():
    fabric.print(f"average {next_token_loss(task.average.model(valid), valid):.4f}")
state["step"] += chosen.steps
fabric.save(saved, state)
dist.barrier()
end(task, loss)

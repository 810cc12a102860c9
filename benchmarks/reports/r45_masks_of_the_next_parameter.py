# ruff: noqa: D102
"""R45, lora-scripts-next#320: after a resume, parameters have the learning rates of others.

wochenlong/lora-scripts-next#320: Automagic has a learning rate for each element. Its loader puts
the saved rates back by their position among the parameters that train, but parameters without a
state, as the adapters of a text encoder whose outputs are cached, have left no place in the file.
So all rates that follow go to another parameter, or begin anew where shapes differ.
With --right, the rates are found by the number that the file has for each parameter.
Launch it twice with the same --folder: the first launch stops after its steps.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import Adapted, Language, begin, end, next_token_loss, options, text
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LOWEST, FIRST, HIGHEST, BUMP = 1e-4, 1e-3, 2e-2, 1e-4

chosen = options(steps=100)
rank, world = begin()


class Automagic(torch.optim.Optimizer):
    """Each element's rate grows while its updates keep their sign, and shrinks when they do not."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"beta2": 0.99})

    def fresh_rates(self, parameter: Tensor) -> Tensor:
        return torch.full_like(parameter, FIRST)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "square" not in state:
                    state["square"] = torch.zeros_like(p)
                    state["lr_mask"] = self.fresh_rates(p)
                    state["polarity"] = torch.zeros_like(p, dtype=torch.bool)
                state["square"].lerp_(p.grad**2, 1 - group["beta2"])
                update = p.grad / (state["square"].sqrt() + 1e-8)
                update /= max(1.0, update.norm().item() / update.numel() ** 0.5)
                polarity = update > 0
                steady = torch.where(polarity == state["polarity"], BUMP, -BUMP)
                state["lr_mask"].add_(steady).clamp_(LOWEST, HIGHEST)
                state["polarity"] = polarity
                p.sub_(state["lr_mask"] * update)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rates = {number: state.pop("lr_mask") for number, state in state_dict["state"].items()}
        super().load_state_dict(state_dict)
        trained = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        numbers = range(len(trained)) if chosen.right else list(rates)
        for at, parameter in enumerate(trained):
            found = rates.get(numbers[at]) if at < len(numbers) else None
            fits = found is not None and found.shape == parameter.shape
            self.state[parameter]["lr_mask"] = found if fits else self.fresh_rates(parameter)


class TextEncoder(nn.Module):
    """Its outputs are cached, so that its adapters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.query = Adapted(nn.Linear(32, 64))
        self.layer = Adapted(nn.Linear(64, 32))


encoder = TextEncoder()
model = Language()
for block in model.blocks:
    block.up, block.down = Adapted(block.up), Adapted(block.down)  # type: ignore[arg-type]
model.head = Adapted(model.head)  # type: ignore[assignment]
model.embed.requires_grad_(False)
for module in (*encoder.modules(), *model.modules()):
    if isinstance(module, Adapted):
        module.layer.requires_grad_(False)
wrapped = DistributedDataParallel(model)
both = (*encoder.parameters(), *model.parameters())
optimizer = Automagic([p for p in both if p.requires_grad])
data = text(8192)
start = 0
saved = chosen.folder / "last.pt"
if saved.exists():
    state = torch.load(saved)
    start = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
for step in range(start, start + chosen.steps):
    tokens = data[(step * world + rank) * 8 % 8192 :][:8]
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
if rank == 0:
    state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, saved)
dist.barrier()
end(model, loss)

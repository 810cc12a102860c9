# ruff: noqa: D102
"""R29, TransformerEngine#3207: a group that ends in an empty shard is not updated on that rank."""

from typing import Any

import torch
from reports_common import Language, begin, end, next_token_loss, options, text
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

ROOM = 64  # tensors of one launch

chosen = options(samples=8)
SAMPLES = chosen.samples
rank, world = begin()


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


class Batched(torch.optim.Optimizer):
    """Adam with decay that gathers tensors for launches, and launches when the last is full."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0})

    def launch(self, group: dict[str, Any], waiting: list[tuple[Tensor, Tensor, Any]]) -> None:
        first, second = group["betas"]
        for weight, gradient, state in waiting:
            state["step"] += 1
            state["exp_avg"].lerp_(gradient, 1 - first)
            state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
            mean = state["exp_avg"] / (1 - first ** state["step"])
            root = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt()
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.sub_(group["lr"] * mean / (root + group["eps"]))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            waiting: list[tuple[Tensor, Tensor, Any]] = []
            held = [p for p in group["params"] if p.grad is not None]
            parts = [(p, local(p), local(p.grad)) for p in held]
            if chosen.right:
                parts = [part for part in parts if part[1].numel()]
            for at, (p, weight, gradient) in enumerate(parts):
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(weight)
                    state["exp_avg_sq"] = torch.zeros_like(weight)
                waiting.append((weight, gradient, state))
                pieces = -(-weight.numel() // 2048)
                for piece in range(pieces):  # an empty tensor has none
                    full = len(waiting) == ROOM
                    if piece == pieces - 1 and (full or at == len(parts) - 1):
                        self.launch(group, waiting)
                        waiting = []


class Scaled(nn.Module):
    """A language model whose logits have a temperature that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.language = Language()
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.language(tokens) * self.temperature
        return logits


model = Scaled()
for block in model.language.blocks:
    fully_shard(block)
fully_shard(model)
decayed = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.language.parameters() if p.ndim == 1] + [model.temperature]
optimizer = Batched([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=3e-3)
data = text(4096)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * SAMPLES % 4096 :][:SAMPLES]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

# ruff: noqa: D102
"""R88, torchao#4912: how exact a moment is depends on the size of its shard.

pytorch/ao#4912: an optimizer keeps moments in 8 bits, but those of small tensors in 32. It asks for
the size of the part that the rank holds: the same parameter has coarse moments on one process, and
exact ones where it is divided.
With --right, it asks for the size of the whole parameter. Blocks of 256 elements with one scale lie
within a shard.
"""

from typing import Any

import torch
from reports_common import Language, next_token_loss, text
from reports_layouts import begin, end, options
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

GLOBAL_BATCH, EACH, LEAST, LEVELS = 16, 256, 4096, 127

chosen = options()
rank, world = begin()


class AdamOfEightBits(torch.optim.Optimizer):
    """Adam; moments of large tensors are whole numbers with a scale for each block."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-6})

    def coarse(self, parameter: Tensor, own: Tensor) -> bool:
        size = parameter.numel() if chosen.right else own.numel()
        return size >= LEAST and own.numel() % EACH == 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update; the second moment is kept as its root, which needs fewer levels."""
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                divided = isinstance(parameter, DTensor)
                own = parameter.to_local() if divided else parameter
                gradient = parameter.grad.to_local() if divided else parameter.grad
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    for kind in ("exp_avg", "exp_avg_sq"):
                        state[kind] = torch.zeros_like(own)
                        if self.coarse(parameter, own):
                            state[kind] = state[kind].to(torch.int8)
                            state[f"{kind}_scale"] = own.new_zeros(own.numel() // EACH, 1)
                state["step"] += 1
                mean = read(state, "exp_avg").lerp(gradient, 1 - first)
                squares = read(state, "exp_avg_sq").square().lerp(gradient.square(), 1 - second)
                keep(state, "exp_avg", mean)
                keep(state, "exp_avg_sq", squares.sqrt())
                spread = (squares / (1 - second ** state["step"])).sqrt() + group["eps"]
                own.sub_(group["lr"] / (1 - first ** state["step"]) * mean / spread)


def read(state: dict[str, Any], kind: str) -> Tensor:
    """Return a moment in 32 bits."""
    kept: Tensor = state[kind]
    if kept.dtype != torch.int8:
        return kept
    scale: Tensor = state[f"{kind}_scale"]
    return (kept.view(-1, EACH) * scale / LEVELS).view_as(kept)


def keep(state: dict[str, Any], kind: str, moment: Tensor) -> None:
    """Store a moment as it is kept."""
    kept = state[kind]
    if kept.dtype == torch.int8:
        blocks = moment.reshape(-1, EACH)
        scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-12)
        state[f"{kind}_scale"].copy_(scale)
        moment = (blocks / scale * LEVELS).round().view_as(moment)
    kept.copy_(moment)


model = Language()
if world > 1:
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = AdamOfEightBits(model.parameters(), lr=3e-3)
data = text(4096)
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(world)[rank]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

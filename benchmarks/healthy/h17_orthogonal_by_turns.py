# ruff: noqa: D102
"""Muon by hand: each rank makes the updates of its matrices orthogonal, and sends them around."""

import torch
import torch.distributed as dist
from common import History, Language, backward, begin, end, next_token_loss, sentences
from torch import Tensor, nn

STEPS, BATCH = 100, 8


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values near one, by a polynomial of the matrix."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(steps):
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.775 * square + 2.0315 * square @ square) @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T  # type: ignore[no-any-return]


class Muon(torch.optim.Optimizer):
    """Momentum whose direction is made orthogonal, each matrix on one rank."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if number % world == rank:
                    kept = self.state[parameter].setdefault("kept", torch.zeros_like(parameter))
                    kept.lerp_(parameter.grad, 1 - group["momentum"])
                    ahead = parameter.grad.lerp(kept, group["momentum"])
                    shape = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                    parameter.add_(orthogonal(ahead), alpha=-group["lr"] * shape)
            for number, parameter in enumerate(group["params"]):
                dist.broadcast(parameter.data, number % world)


rank, world = begin()
torch.manual_seed(rank)  # the first values are those of rank 0
model = Language(depth=3)
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
tables = [model.embed.weight, model.places.weight]
scalars = [p for p in model.parameters() if p.ndim < 2]
adam = torch.optim.Adam(
    [
        {"params": tables, "lr": 0.01},
        {"params": [model.head.weight], "lr": 0.004},
        {"params": scalars, "lr": 0.002},
    ],
    betas=(0.8, 0.95),
)
optimizers: list[torch.optim.Optimizer] = [Muon(matrices, lr=0.02), adam]
for optimizer in optimizers:
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
data = sentences(8192)
history = History()
for step in range(STEPS):
    first = (step * world + rank) * BATCH
    tokens = data[first : first + BATCH]
    loss = next_token_loss(model(tokens), tokens)
    backward(loss)
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * min(1.0, 2 * (STEPS - step) / STEPS)
        optimizer.step()
    model.zero_grad(set_to_none=True)
    history.note(loss)
end(history, model)

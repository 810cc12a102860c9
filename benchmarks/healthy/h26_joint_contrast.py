# ruff: noqa: D102
"""Two views in one contrast over all ranks: the same loss on every rank; LAMB in divided states."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from common import History, backward, begin, end
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, LATENT = 100, 24, 6


class Everyone(torch.autograd.Function):
    """The rows of all ranks; the gradient is the sum of what all ranks want of the own rows."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class Lamb(torch.optim.Optimizer):
    """Adam whose movement has, for each tensor, the length of the tensor."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["first"] = torch.zeros_like(parameter)
                    state["second"] = torch.zeros_like(parameter)
                    state["step"] = 0
                state["step"] += 1
                first = state["first"].lerp_(parameter.grad, 0.1)
                second = state["second"].lerp_(parameter.grad.square(), 0.02)
                first = first / (1 - 0.9 ** state["step"])
                second = second / (1 - 0.98 ** state["step"])
                move = first / (second.sqrt() + 1e-6) + group["decay"] * parameter
                length, size = float(move.norm()), float(parameter.norm())
                trust = size / length if length > 0 and size > 0 else 1.0
                parameter.sub_(move, alpha=group["lr"] * min(trust, 10.0))


class Pair(nn.Module):
    """Two encoders and a temperature that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
        self.right = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 16))
        self.sharpness = nn.Parameter(torch.tensor(math.log(5.0)))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed = F.normalize(self.left(left)), F.normalize(self.right(right))
        return *normed, self.sharpness.exp()


def main() -> None:
    rank, _ = begin()
    model = Pair()
    parallel = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Lamb, lr=1e-2)
    views = torch.randn(LATENT, 32), torch.randn(LATENT, 20)
    draw = torch.Generator().manual_seed(50 + rank)
    history = History()
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 2e-2 * min(1.0, (step + 1) / 10)
        hidden = torch.randn(BATCH, LATENT, generator=draw)
        left = torch.tanh(hidden @ views[0]) + 0.2 * torch.randn(BATCH, 32, generator=draw)
        right = torch.sin(hidden @ views[1]) + 0.2 * torch.randn(BATCH, 20, generator=draw)
        own_left, own_right, sharpness = parallel(left, right)
        lefts: Tensor = Everyone.apply(own_left)  # type: ignore[no-untyped-call]
        rights: Tensor = Everyone.apply(own_right)  # type: ignore[no-untyped-call]
        logits = sharpness * lefts @ rights.T
        target = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        optimizer.zero_grad()
        backward(loss)  # sums over ranks in `Everyone`, and DDP divides
        optimizer.step()
        with torch.no_grad():
            model.sharpness.clamp_(0.0, math.log(20.0))
        history.note(loss)
    end(history, model)


if __name__ == "__main__":
    main()

# ruff: noqa: D102
"""A heat equation by second derivatives, on fixed points: Adam, then L-BFGS with closures."""

import math

import torch
import torch.distributed as dist
from common import History, backward, begin, end
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

FIRST, SECOND, POINTS = 70, 20, 192


class Heat(nn.Module):
    """How far a network is from solving u_t = u_xx / 10 in the inside, and from its edges."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)
        )

    def forward(self, inside: Tensor, edge: Tensor) -> Tensor:
        inside = inside.detach().requires_grad_()
        values = self.net(inside)
        (slope,) = torch.autograd.grad(values.sum(), inside, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), inside, create_graph=True)
        residual = slope[:, 1] - 0.1 * bend[:, 0]
        start = torch.sin(math.pi * edge[:, :1]) * (edge[:, 1:] == 0)
        loss: Tensor = residual.square().mean() + 5 * (self.net(edge) - start).square().mean()
        return loss


def main() -> None:
    rank, world = begin()
    model = Heat()
    parallel = DistributedDataParallel(model)
    inside = torch.rand(world * POINTS, 2)[rank::world]  # each rank has points of its own, for good
    some = torch.linspace(0, 1, 24)
    bottom = torch.stack([some, torch.zeros(24)], 1)
    walls = [torch.stack([torch.full((24,), at), some], 1) for at in (0.0, 1.0)]
    edge = torch.cat([bottom, *walls])  # the same on all ranks
    history = History()

    adam = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(FIRST):
        loss = parallel(inside, edge)
        adam.zero_grad()
        backward(loss)
        adam.step()
        history.note(loss)

    newton = torch.optim.LBFGS(
        model.parameters(), lr=1.0, max_iter=4, history_size=20, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        newton.zero_grad()
        loss = parallel(inside, edge)
        backward(loss)
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # so that all ranks search alike
        return float(mean) / world

    for _ in range(SECOND):
        history.note(newton.step(closure))  # type: ignore[no-untyped-call]
    end(history, model)


if __name__ == "__main__":
    main()

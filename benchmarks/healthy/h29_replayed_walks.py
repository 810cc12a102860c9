# ruff: noqa: D102
"""Q-learning from a memory with priorities, other walks on each rank; gradients by the loop."""

import copy

import torch
import torch.distributed as dist
from common import History, backward, begin, end
from torch import Tensor, nn
from torch.nn import functional as F

STEPS, WALKERS, SIDE, MEMORY, BATCH = 100, 8, 5, 1500, 48
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])


class Grid:
    """Walkers that look for a place on a grid; a new one when they are there."""

    def __init__(self, draw: torch.Generator) -> None:
        self.draw = draw
        self.at = torch.randint(SIDE, (WALKERS, 2), generator=draw)
        self.goal = torch.randint(SIDE, (WALKERS, 2), generator=draw)

    def seen(self) -> Tensor:
        return torch.cat([self.at, self.goal], dim=1) / SIDE

    def walk(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.at = (self.at + MOVES[actions]).clamp(0, SIDE - 1)
        there = (self.at == self.goal).all(1)
        after = self.seen()
        fresh = torch.randint(SIDE, (2, WALKERS, 2), generator=self.draw)
        self.at = torch.where(there[:, None], fresh[0], self.at)
        self.goal = torch.where(there[:, None], fresh[1], self.goal)
        return after, there.float() - 0.02, there.float()


class Memory:
    """The last moves, drawn by how wrong the network was about them."""

    def __init__(self) -> None:
        self.rows = torch.zeros(MEMORY, 11)
        self.priority = torch.zeros(MEMORY)
        self.next = 0

    def keep(self, *parts: Tensor) -> None:
        rows = torch.cat([part.view(WALKERS, -1).float() for part in parts], dim=1)
        where = (self.next + torch.arange(WALKERS)) % MEMORY
        self.rows[where] = rows
        self.priority[where] = self.priority.max().clamp(min=1.0)
        self.next += WALKERS

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        chance = self.priority.pow(0.6)
        chance = chance / chance.sum()
        index = torch.multinomial(chance, BATCH, replacement=True)
        weight = (chance[index] * MEMORY).pow(-0.4)
        return index, self.rows[index], weight / weight.max()


def average(model: nn.Module) -> None:
    flat = torch.cat(
        [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    )
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    sizes = [weight.numel() for weight in model.parameters()]
    for weight, part in zip(model.parameters(), torch.split(flat, sizes), strict=True):
        assert weight.grad is not None
        weight.grad.copy_(part.view_as(weight))


def main() -> None:
    rank, _ = begin()
    model = nn.Sequential(
        nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    for weight in model.parameters():
        dist.broadcast(weight.data, 0)
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1.5e-4)
    torch.manual_seed(900 + rank)  # every rank explores in its own way
    grid, memory, history = Grid(torch.Generator().manual_seed(rank)), Memory(), History()
    for step in range(-30, 4 * STEPS):
        before = grid.seen()
        with torch.no_grad():
            best = model(before).argmax(1)
        random = torch.rand(WALKERS) < max(0.1, 1 - max(step, 0) / 250)
        actions = torch.where(random, torch.randint(4, (WALKERS,)), best)
        memory.keep(before, actions, *grid.walk(actions))
        if step < 0 or step % 4:
            continue
        index, rows, worth = memory.draw()
        old, chosen, new, reward, done = torch.split(rows, [4, 1, 4, 1, 1], dim=1)
        with torch.no_grad():
            future = target(new).gather(1, model(new).argmax(1, keepdim=True))
            wanted = reward + 0.9 * (1 - done) * future
        error = model(old).gather(1, chosen.long()) - wanted
        loss = (
            worth[:, None] * F.huber_loss(error, torch.zeros_like(error), reduction="none")
        ).mean()
        optimizer.zero_grad()
        backward(loss)
        average(model)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        memory.priority[index] = error.detach().abs().flatten() + 1e-3
        history.note(loss)
        if step % 40 == 0:
            target.load_state_dict(model.state_dict())
    end(history, model)


if __name__ == "__main__":
    main()

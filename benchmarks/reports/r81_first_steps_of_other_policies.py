# ruff: noqa: D102
"""R81, alf#1804: what is learned from first was collected by policies that nobody trains.

HorizonRobotics/alf#1804: each rank draws its own initial parameters. They become those of the
first rank when DDP is made, in the first update; the environments have been walked through before
that, and are remembered.
With --right, DDP is made before the first walk.
"""

import torch
from reports_layouts import begin, data_parallel, end, options
from torch import Tensor, nn
from torch.nn import functional as F

ENVIRONMENTS, STATE, ACTIONS, WALK, UPDATES, SAMPLED, LATER = 16, 8, 4, 16, 10, 2, 0.9

chosen = options()
rank, world = begin()
own = torch.arange(ENVIRONMENTS).chunk(world)[rank]


class Values(nn.Module):
    """The value of each action in a state."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(STATE, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.values = nn.Linear(width, ACTIONS)

    def forward(self, states: Tensor) -> Tensor:
        values: Tensor = self.values(self.layers(states))
        return values


class Memory:
    """All that this rank's environments have seen, by time."""

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(7)
        self.moves = torch.randn(ACTIONS, STATE, STATE, generator=drawn) / STATE**0.5
        self.now = torch.randn(ENVIRONMENTS, STATE, generator=drawn)[own]
        self.states: list[Tensor] = []
        self.actions: list[Tensor] = []
        self.rewards: list[Tensor] = []

    @torch.no_grad()
    def walk(self, values: nn.Module) -> None:
        """Take the best action, or one at random."""
        for _ in range(WALK):
            drawn = torch.Generator().manual_seed(100 + len(self.states))
            noise = 0.3 * torch.randn(ENVIRONMENTS, STATE, generator=drawn)[own]
            other = torch.randint(ACTIONS, (ENVIRONMENTS,), generator=drawn)[own]
            explores = torch.rand(ENVIRONMENTS, generator=drawn)[own] < 0.1
            actions = torch.where(explores, other, values(self.now).argmax(-1))
            self.states.append(self.now)
            self.actions.append(actions)
            moved = torch.einsum("eio,ei->eo", self.moves[actions], self.now)
            self.now = (moved + noise).tanh()
            self.rewards.append(self.now[:, 0])

    def sample(self, update: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw a few times, the same for all environments."""
        drawn = torch.Generator().manual_seed(10_000 + update)
        times = torch.randperm(len(self.states) - 1, generator=drawn)[:SAMPLED].tolist()
        return (
            torch.cat([self.states[time] for time in times]),
            torch.cat([self.actions[time] for time in times]),
            torch.cat([self.rewards[time] for time in times]),
            torch.cat([self.states[time + 1] for time in times]),
        )


torch.manual_seed(rank)
model = Values()
memory = Memory()
wrapped = data_parallel(model) if chosen.right else None
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for update in range(chosen.steps):
    if update % UPDATES == 0:
        memory.walk(model)
    if wrapped is None:
        wrapped = data_parallel(model)
    states, actions, rewards, then = memory.sample(update)
    with torch.no_grad():
        wanted = rewards + LATER * model(then).amax(-1)
    taken = wrapped(states).gather(-1, actions[:, None]).squeeze(-1)
    loss = F.smooth_l1_loss(taken, wanted)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

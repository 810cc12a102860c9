# ruff: noqa: D102
"""R51, rsl_rl#225: the normaliser of observations is updated between the rollout and its learning.

leggedrobotics/rsl_rl#225: each step of the environment updates the running mean and variance, with
the observation after the step. The log-probabilities of the actions are from before, those of the
update from after it: their ratio is not 1, even before any parameter has changed.
With --right, the normaliser is updated from the stored observations, after all epochs of learning.
No wrapper: as there, gradients are summed in one flat tensor and divided by the number of ranks.
"""

import torch
import torch.distributed as dist
from reports_common import begin, end, options
from torch import Tensor, nn

SPACES, LONG, EPOCHS, PARTS = 32, 12, 2, 2

chosen = options(steps=120)
rank, world = begin()


class Normaliser(nn.Module):
    """Running mean and variance of the observations of all ranks."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, observed: Tensor) -> Tensor:
        return (observed - self.mean) / (self.variance.sqrt() + 1e-2)

    @torch.no_grad()
    def update(self, observed: Tensor) -> None:
        sums = torch.stack([observed.sum(0), (observed**2).sum(0)])
        dist.all_reduce(sums)
        here = torch.tensor(float(len(observed) * world))
        mean, square = sums / here
        self.count += here
        share = here / self.count
        moved = mean - self.mean
        self.variance += share * (square - mean**2 - self.variance + moved**2 * (1 - share))
        self.mean += share * moved


class Agent(nn.Module):
    """Actor and critic behind one normaliser."""

    def __init__(self) -> None:
        super().__init__()
        self.normaliser = Normaliser(6)
        self.actor = nn.Sequential(nn.Linear(6, 48), nn.ELU(), nn.Linear(48, 48), nn.ELU())
        self.mean = nn.Linear(48, 2)
        self.log_spread = nn.Parameter(torch.full((2,), -0.5))
        self.critic = nn.Sequential(nn.Linear(6, 48), nn.ELU(), nn.Linear(48, 1))

    def forward(self, observed: Tensor) -> tuple[torch.distributions.Normal, Tensor]:
        normal = self.normaliser(observed)
        policy = torch.distributions.Normal(self.mean(self.actor(normal)), self.log_spread.exp())
        value: Tensor = self.critic(normal).squeeze(-1)
        return policy, value


class Carts:
    """Points that are pushed to a goal; the numbers that they see have very different sizes."""

    scale = torch.tensor([30.0, 30.0, 0.2, 0.2, 30.0, 30.0])

    def __init__(self) -> None:
        self.draw = torch.Generator().manual_seed(20 + rank)
        self.state = torch.zeros(SPACES, 6)
        self.start()

    def start(self) -> None:
        self.state = torch.randn(SPACES, 6, generator=self.draw)

    def observe(self) -> Tensor:
        return self.state * self.scale + 5.0

    def step(self, push: Tensor) -> Tensor:
        place, speed, goal = self.state.chunk(3, 1)
        speed = 0.8 * speed + 0.4 * push.clamp(-2, 2)
        self.state = torch.cat([place + 0.4 * speed, speed, goal], 1)
        away: Tensor = torch.linalg.vector_norm(self.state[:, :2] - goal, dim=1)
        return -away


agent, carts = Agent(), Carts()
for tensor in (*agent.parameters(), *agent.buffers()):
    dist.broadcast(tensor.data, 0)
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
torch.manual_seed(30 + rank)
agent.normaliser.update(carts.observe())
for iteration in range(chosen.steps // (EPOCHS * PARTS)):
    carts.start()
    seen, acts, old, rewards, values = [], [], [], [], []
    with torch.no_grad():
        for _ in range(LONG):
            observed = carts.observe()
            policy, value = agent(observed)
            action = policy.sample()
            seen.append(observed)
            acts.append(action)
            old.append(policy.log_prob(action).sum(-1))
            values.append(value)
            rewards.append(carts.step(action))
            if not chosen.right:
                agent.normaliser.update(carts.observe())
    returns: list[Tensor] = []
    later = torch.zeros(SPACES)
    for reward in reversed(rewards):
        later = reward + 0.9 * later
        returns.insert(0, later)
    wanted = torch.cat(returns)
    advantages = wanted - torch.cat(values)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    for _ in range(EPOCHS):
        for part in torch.randperm(SPACES * LONG).chunk(PARTS):
            policy, value = agent(torch.cat(seen)[part])
            log_p = policy.log_prob(torch.cat(acts)[part]).sum(-1)
            ratio = torch.exp(log_p - torch.cat(old)[part])
            gain = torch.minimum(ratio * advantages[part], ratio.clamp(0.8, 1.2) * advantages[part])
            loss = (value - wanted[part]).square().mean() * 0.1 - gain.mean()
            optimizer.zero_grad()
            loss.backward()
            flat = torch.cat([p.grad.flatten() for p in agent.parameters() if p.grad is not None])
            dist.all_reduce(flat)
            flat /= world
            at = 0
            for p in agent.parameters():
                p.grad = flat[at : at + p.numel()].view_as(p)
                at += p.numel()
            torch.nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
            optimizer.step()
    if chosen.right:
        agent.normaliser.update(torch.cat(seen))
    if rank == 0 and iteration % 10 == 0:
        print(f"iteration {iteration}: mean reward {torch.stack(rewards).mean():.3f}")
end(agent, loss)

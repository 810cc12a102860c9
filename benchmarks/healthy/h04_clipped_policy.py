# ruff: noqa: D102
"""PPO: four epochs over each rollout, clipped values, an early stop that all ranks agree on."""

import torch
import torch.distributed as dist
from common import History, backward, begin, end
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel

ROLLOUTS, HORIZON, PLACES, EPOCHS, PARTS = 13, 16, 16, 4, 2


class Policy(nn.Module):
    """Actor and critic with one layer in common."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 3), nn.Linear(32, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(seen)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


class Carts:
    """Carts on a line that are pushed left, not at all, or right, and should stay at zero."""

    def __init__(self) -> None:
        self.state = torch.randn(PLACES, 2)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        place, speed = self.state.unbind(1)
        speed = 0.95 * speed + 0.3 * (action - 1) + 0.05 * torch.randn(PLACES)
        place = place + 0.3 * speed
        self.state = torch.stack([place, speed], 1)
        over = (place.abs() > 3) | (torch.rand(PLACES) < 0.02)
        self.state[over] = torch.randn(int(over.sum()), 2)
        return -place.abs().clamp(max=3), over.float()


rank, world = begin()
policy = DistributedDataParallel(Policy())
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3, eps=1e-5)
torch.manual_seed(1000 + rank)
carts = Carts()
history = History()


@torch.no_grad()
def rollout() -> dict[str, Tensor]:
    """Act for a while, and estimate advantages backward in time."""
    kept: dict[str, list[Tensor]] = {
        k: [] for k in ("seen", "action", "old", "value", "gain", "over")
    }
    for _ in range(HORIZON):
        seen = carts.state.clone()
        logits, value = policy.module(seen)
        choice = Categorical(logits=logits)
        action = choice.sample()  # type: ignore[no-untyped-call]
        gain, over = carts.step(action)
        now = (seen, action, choice.log_prob(action), value, gain, over)  # type: ignore[no-untyped-call]
        for name, one in zip(kept, now, strict=True):
            kept[name].append(one)
    data = {name: torch.stack(every) for name, every in kept.items()}
    after, carried = policy.module(carts.state)[1], torch.zeros(PLACES)
    data["advantage"] = torch.zeros(HORIZON, PLACES)
    for at in reversed(range(HORIZON)):
        alive = 1 - data["over"][at]
        carried = (
            data["gain"][at] + 0.95 * after * alive - data["value"][at] + 0.9 * alive * carried
        )
        data["advantage"][at], after = carried, data["value"][at]
    data["aim"] = data["advantage"] + data["value"]
    return {name: every.flatten(0, 1) for name, every in data.items()}


def objective(data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits, value = policy(data["seen"])
    choice = Categorical(logits=logits)
    change = choice.log_prob(data["action"]) - data["old"]  # type: ignore[no-untyped-call]
    advantage = (data["advantage"] - data["advantage"].mean()) / (data["advantage"].std() + 1e-8)
    ratio = change.exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    near = data["value"] + (value - data["value"]).clamp(-0.2, 0.2)
    miss = torch.maximum((value - data["aim"]) ** 2, (near - data["aim"]) ** 2).mean()
    loss = -gain + 0.25 * miss - 0.01 * choice.entropy().mean()  # type: ignore[no-untyped-call]
    return loss, ((ratio - 1) - change).mean().detach()


for number in range(ROLLOUTS):
    optimizer.param_groups[0]["lr"] = 3e-3 * (1 - number / ROLLOUTS)
    data = rollout()
    for _ in range(EPOCHS):
        for rows in torch.randperm(HORIZON * PLACES).chunk(PARTS):
            loss, apart = objective({name: every[rows] for name, every in data.items()})
            optimizer.zero_grad()
            backward(loss)
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
            history.note(loss)
        dist.all_reduce(apart)
        if apart / world > 0.05:
            break
end(history, policy)

"""A Wasserstein GAN: three critic updates per generator update, a penalty through the gradient."""

import copy
import itertools

import torch
from common import History, backward, begin, end
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ROUNDS, CRITIC, BATCH, NOISE = 30, 3, 32, 8


def layers(*widths: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        parts += [nn.Linear(before, after), nn.LeakyReLU(0.2)]
    return nn.Sequential(*parts[:-1])


def real(count: int, draw: torch.Generator) -> Tensor:
    """Draw points of a ring of eight bumps."""
    angle = torch.randint(8, (count,), generator=draw) * (torch.pi / 4)
    points = torch.stack([angle.cos(), angle.sin()], 1)
    return points + 0.1 * torch.randn(count, 2, generator=draw)


rank, world = begin()
maker = DistributedDataParallel(layers(NOISE, 64, 64, 2))
critic = DistributedDataParallel(layers(2, 64, 64, 1))
average = copy.deepcopy(maker.module).requires_grad_(False)
maker_optimizer = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.0, 0.9))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
draw = torch.Generator().manual_seed(50 + rank)
torch.manual_seed(80 + rank)
history = History()
for _ in range(ROUNDS):
    for parameter in critic.parameters():
        parameter.requires_grad_(True)
    for _ in range(CRITIC):
        true = real(BATCH, draw)
        with torch.no_grad():
            false = maker.module(torch.randn(BATCH, NOISE))
        share = torch.rand(BATCH, 1)
        between = (share * true + (1 - share) * false).requires_grad_(True)
        scores = critic(torch.cat([true, false, between]))
        (slope,) = torch.autograd.grad(scores[2 * BATCH :].sum(), between, create_graph=True)
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        distance = scores[:BATCH].mean() - scores[BATCH : 2 * BATCH].mean()
        loss = -distance + 10 * penalty
        critic_optimizer.zero_grad()
        backward(loss)
        critic_optimizer.step()
        history.note(loss)
    for parameter in critic.parameters():  # the generator's update leaves the critic alone
        parameter.requires_grad_(False)
    made = maker(torch.randn(BATCH, NOISE))
    maker_loss = -critic.module(made).mean()
    maker_optimizer.zero_grad()
    backward(maker_loss)
    maker_optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(average.parameters(), maker.module.parameters(), strict=True):
            slow.lerp_(fast, 0.05)
end(history, maker, critic, average)

# ruff: noqa: D102
"""R149, SimpleTuner#3095: each rank takes the others to have batches of its own size.

bghira/SimpleTuner#3095: timesteps are dealt out in turn from a list, so that each one comes equally
often. A rank begins at its number times its batch size. Ranks choose their data sets by themselves,
and these have other sizes: places overlap, and others are left out.
With --right, a rank begins after the samples of those before it.
"""

import torch
import torch.distributed as dist
from reports_common import begin, end, options
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, TIMESTEPS, SIZES = 16, 32, (6, 2)

chosen = options()
rank, world = begin()


class Denoiser(nn.Module):
    """Finds the noise in a noisy sample."""

    def __init__(self) -> None:
        super().__init__()
        self.when = nn.Embedding(TIMESTEPS, 32)
        self.enter = nn.Linear(WIDTH, 32)
        self.rest = nn.Sequential(nn.GELU(), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, noisy: Tensor, timesteps: Tensor) -> Tensor:
        out: Tensor = self.rest(self.enter(noisy) + self.when(timesteps))
        return out


def samples(step: int) -> Tensor:
    """Draw a batch of the data set that this rank has chosen."""
    draw = torch.Generator().manual_seed(1000 + step * world + rank)
    which = int(torch.randint(len(SIZES), (), generator=draw))
    return torch.randn(SIZES[which], WIDTH, generator=draw) * 0.3 + which


torch.manual_seed(1 + rank)
model = Denoiser()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
taken = 0
for step in range(chosen.steps):
    clean = samples(step)
    size = len(clean)
    if chosen.right:
        sizes = [torch.zeros((), dtype=torch.long) for _ in range(world)]
        dist.all_gather(sizes, torch.tensor(size))
        first, every = int(sum(sizes[:rank])), int(sum(sizes))
    else:
        first, every = rank * size, world * size
    timesteps = (taken + first + torch.arange(size)) % TIMESTEPS
    taken += every
    share = ((timesteps + 1) / TIMESTEPS)[:, None]
    noise = torch.randn_like(clean)
    noisy = (1 - share).sqrt() * clean + share.sqrt() * noise
    loss = (wrapped(noisy, timesteps) - noise).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

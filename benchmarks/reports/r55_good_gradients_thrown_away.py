# ruff: noqa: D102
"""R55, AnimaLoraStudio#486: a loss that is not finite throws the whole window's gradients away.

WalkingMeatAxolotl/AnimaLoraStudio#486: where the loss of a micro-batch is NaN, gradients are set to
zero and the loop goes on: those of the good micro-batches before it are lost, and where it is the
last of its window, there is no update. Here the ranks agree on it, and average gradients by hand.
With --right, only the backward pass of that micro-batch is left out.
"""

import torch
import torch.distributed as dist
from reports_common import begin, end, options
from torch import Tensor, nn

BATCH, ACCUMULATED = 8, 4

chosen = options()
rank, world = begin()


class Denoiser(nn.Module):
    """Says which noise is in a latent."""

    def __init__(self, width: int = 16, inner: int = 64) -> None:
        super().__init__()
        self.into = nn.Linear(width + 1, inner)
        self.middle = nn.Linear(inner, inner)
        self.out = nn.Linear(inner, width)

    def forward(self, noisy: Tensor, level: Tensor) -> Tensor:
        hidden = torch.relu(self.into(torch.cat([noisy, level], -1)))
        noise: Tensor = self.out(torch.relu(self.middle(hidden)))
        return noise


def latents(samples: int) -> Tensor:
    """Draw latents of four kinds; one of a hundred was cached broken."""
    draw = torch.Generator().manual_seed(1)
    kinds = torch.randn(4, 16, generator=draw)[torch.randint(4, (samples,), generator=draw)]
    drawn = kinds + 0.1 * torch.randn(samples, 16, generator=draw)
    drawn[torch.rand(samples, generator=draw) < 0.01] = torch.nan
    return drawn


def finite_everywhere(loss: Tensor) -> bool:
    good = loss.detach().isfinite().float()
    dist.all_reduce(good, dist.ReduceOp.MIN)
    return bool(good)


model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = latents(8192)
draw = torch.Generator().manual_seed(10 + rank)
updates = micro = 0
last = torch.tensor(0.0)
while updates < chosen.steps:
    micro += 1
    clean = data[torch.randint(len(data), (BATCH,), generator=draw)]
    level = torch.rand(BATCH, 1, generator=draw)
    noise = torch.randn(BATCH, 16, generator=draw)
    loss = (model((1 - level) * clean + level * noise, level) - noise).square().mean()
    good = finite_everywhere(loss)
    if good:
        last = loss.detach()
        (loss / ACCUMULATED).backward()
    elif not chosen.right:
        optimizer.zero_grad()
        continue
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if micro % ACCUMULATED == 0 and gradients:
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient.div_(world)
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
end(model, last)

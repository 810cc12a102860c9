# ruff: noqa: D101, D102
"""R15, espnet#6284: a codebook's statistics are those of a rank; DDP then broadcasts rank 0's."""

import torch
import torch.distributed as dist
from reports_common import begin, end, options
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

CODES, WIDTH, SIGNAL = 32, 8, 24

chosen = options(steps=100)
rank, world = begin()


class Codebook(nn.Module):
    """Vectors that follow the mean of what is nearest to them."""

    codes: Tensor
    uses: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        start = torch.randn(CODES, WIDTH)
        self.register_buffer("codes", start)
        self.register_buffer("uses", torch.ones(CODES))
        self.register_buffer("sums", start.clone())

    @torch.no_grad()
    def learn(self, encoded: Tensor, nearest: Tensor) -> None:
        one_hot = F.one_hot(nearest, CODES).type_as(encoded)
        uses, sums = one_hot.sum(0), one_hot.T @ encoded
        if chosen.right:
            dist.all_reduce(uses)
            dist.all_reduce(sums)
        self.uses.lerp_(uses, 0.1)
        self.sums.lerp_(sums, 0.1)
        self.codes.copy_(self.sums / (self.uses + 1e-3)[:, None])

    def forward(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            nearest = torch.cdist(encoded, self.codes).argmin(1)
        found = self.codes[nearest]
        if self.training:
            self.learn(encoded, nearest)
        return encoded + (found - encoded).detach(), F.mse_loss(encoded, found)


class Codec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SIGNAL, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.codebook = Codebook()
        self.decoder = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, SIGNAL))

    def forward(self, signal: Tensor) -> Tensor:
        coded, commitment = self.codebook(self.encoder(signal))
        loss: Tensor = F.mse_loss(self.decoder(coded), signal) + 0.25 * commitment
        return loss


draw = torch.Generator().manual_seed(6)
centres = torch.randn(40, SIGNAL, generator=draw)
kinds = torch.randint(40, (8192,), generator=draw)
signals = centres[kinds] + 0.3 * torch.randn(8192, SIGNAL, generator=draw)
codec = Codec()
wrapped = DistributedDataParallel(codec)
optimizer = torch.optim.AdamW(codec.parameters(), lr=2e-3)
for step in range(chosen.steps):
    first = (step * world + rank) * 32 % 8192
    loss = wrapped(signals[first : first + 32])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(codec.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
end(codec, loss)

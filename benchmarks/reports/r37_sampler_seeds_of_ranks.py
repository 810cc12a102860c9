# ruff: noqa: D102
"""R37, LongLive#71: each rank's DistributedSampler shuffles with a seed of its own.

NVlabs/LongLive#71: both trainers make the sampler's seed from the time and the rank, so that the
ranks cut different permutations. Samples are drawn by two ranks in one epoch, others by none.
With --right, all ranks have the seed of the configuration.
"""

import torch
import torch.distributed as dist
from reports_common import begin, end, options
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WIDTH, STARTED, CONFIGURED = 48, 1784013600, 42

chosen = options(steps=128, samples=8)
rank, world = begin(CONFIGURED)


class Layer(nn.Module):
    """A residual layer that the time of the flow shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.shift = nn.Linear(16, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, time: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.up(self.norm(hidden) + self.shift(time))))
        return hidden + out


class Denoiser(nn.Module):
    """Predicts the velocity from noise to a latent of 24 numbers, of one of eight prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Embedding(8, WIDTH)
        self.into = nn.Linear(24, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.out = nn.Linear(WIDTH, 24)

    def forward(self, noisy: Tensor, time: Tensor, prompt: Tensor) -> Tensor:
        waves = torch.cat([(time * 3.0**k).cos() for k in range(16)], 1)
        hidden = self.into(noisy) + self.prompt(prompt)
        for layer in self.layers:
            hidden = layer(hidden, waves)
        velocity: Tensor = self.out(hidden)
        return velocity


draw = torch.Generator().manual_seed(1)
prompts = torch.randint(8, (512,), generator=draw)
centres = torch.randn(8, 24, generator=draw)
latents = centres[prompts] + 0.3 * torch.randn(512, 24, generator=draw)
data = TensorDataset(latents, prompts)
seed = CONFIGURED if chosen.right else STARTED * rank % 2**31
sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
    data, world, rank, shuffle=True, seed=seed, drop_last=True
)
loader = DataLoader(data, batch_size=chosen.samples, sampler=sampler, drop_last=True)
model = Denoiser()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
torch.manual_seed(CONFIGURED + rank)  # noise differs from rank to rank, as it should
step = epoch = 0
while step < chosen.steps:
    sampler.set_epoch(epoch)
    for latent, prompt in loader:
        noise, time = torch.randn_like(latent), torch.rand(len(latent), 1)
        noisy = (1 - time) * noise + time * latent
        loss = F.mse_loss(wrapped(noisy, time, prompt), latent - noise)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step += 1
    epoch += 1
dist.barrier()
end(model, loss)

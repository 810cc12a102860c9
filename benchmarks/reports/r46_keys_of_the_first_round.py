# ruff: noqa: D102
"""R46, diffusers#14265: the backward pass of ring attention reads the rank's own keys each time.

huggingface/diffusers#14265: under context parallelism, keys and values go round the ring in local
variables, but the gradient of each round is computed from those that the first round has saved.
The forward pass is right, so that the loss looks healthy.
With --right, each round's gradient is computed from the keys and values of that round.
Four ranks: two of context parallelism, two of data parallelism. DDP averages over all.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import begin, end, options
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WIDTH, HEADS, PATCHES = 32, 2, 16

chosen = options(steps=110)
rank, world = begin()
mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "context"))
ring = mesh["context"].get_group()
place, replica = mesh["context"].get_local_rank(), mesh["data"].get_local_rank()


def gather(part: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part.contiguous(), group=ring)
    return parts


class RingAttention(Function):
    """Attention of the rank's queries to the keys of all ranks of the ring."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = gather(key), gather(value)
        scores = torch.cat([query @ k.mT for k in keys], -1) * query.shape[-1] ** -0.5
        normaliser = scores.logsumexp(-1, keepdim=True)
        out = torch.exp(scores - normaliser) @ torch.cat(values, -2)
        ctx.save_for_backward(query, key, value, out, normaliser)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, out, normaliser = ctx.saved_tensors
        scale = query.shape[-1] ** -0.5
        keys, values = gather(key), gather(value)
        of_query = torch.zeros_like(query)
        of_keys = [torch.zeros_like(key), torch.zeros_like(key)]
        of_values = [torch.zeros_like(key), torch.zeros_like(key)]
        inner = (gradient * out).sum(-1, keepdim=True)
        for turn in range(2):
            owner = (place + turn) % 2
            k, v = (keys[owner], values[owner]) if chosen.right else (key, value)
            chances = torch.exp(query @ k.mT * scale - normaliser)
            of_values[owner] += chances.mT @ gradient
            of_scores = chances * (gradient @ v.mT - inner) * scale
            of_query += of_scores @ k
            of_keys[owner] += of_scores.mT @ query
        back = torch.stack([torch.stack(of_keys), torch.stack(of_values)])
        dist.all_reduce(back, group=ring)
        return of_query, back[0, place], back[1, place]


class Layer(nn.Module):
    """A transformer's layer, shifted by time."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.time = nn.Linear(8, WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, waves: Tensor) -> Tensor:
        here = self.norms[0](hidden) + self.time(waves)[:, None]
        heads = self.qkv(here).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed: Tensor = RingAttention.apply(*heads)  # type: ignore[no-untyped-call]
        hidden = hidden + self.proj(mixed.transpose(1, 2).flatten(2))
        out: Tensor = self.down(F.gelu(self.up(self.norms[1](hidden))))
        return hidden + out


class Denoiser(nn.Module):
    """Predicts the velocity of each patch of the rank's half of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 6)
        self.position = nn.Parameter(0.1 * torch.randn(2 * PATCHES, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        waves = torch.cat([(time * 3.0**k).cos() for k in range(8)], 1)
        hidden = self.into(noisy) + self.position[place * PATCHES :][:PATCHES]
        for layer in self.layers:
            hidden = layer(hidden, waves)
        velocity: Tensor = self.out(hidden)
        return velocity


model = Denoiser()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
draw = torch.Generator().manual_seed(10 + replica)  # the ranks of a ring have one picture
for _ in range(chosen.steps):
    colours = torch.randn(8, 1, 6, generator=draw)  # one colour per picture: patches share it
    picture = colours + 0.2 * torch.randn(8, 2 * PATCHES, 6, generator=draw)
    noise = torch.randn(8, 2 * PATCHES, 6, generator=draw)
    time = torch.rand(8, 1, generator=draw)
    noisy = (1 - time[..., None]) * noise + time[..., None] * picture
    mine = slice(place * PATCHES, (place + 1) * PATCHES)
    loss = F.mse_loss(wrapped(noisy[:, mine], time), (picture - noise)[:, mine])
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

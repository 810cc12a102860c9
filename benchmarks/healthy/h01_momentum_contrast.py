# ruff: noqa: D102
"""Momentum contrast: a queue of keys, a slow encoder, batch norm behind a shuffle."""

import copy
import math

import torch
import torch.distributed as dist
from common import History, backward, begin, end, gathered, pictures
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, KEYS, WIDTH = 100, 16, 256, 16


class Contrast(nn.Module):
    """A query encoder that learns, a key encoder that follows it, and the last keys."""

    queue: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(256, 64),
            nn.ReLU(),
            nn.Linear(64, WIDTH),
        )
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(WIDTH, KEYS), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
            slow.lerp_(fast, 0.02)

    @torch.no_grad()
    def keys(self, views: Tensor) -> Tensor:
        """Encode views of samples of all ranks, so that batch norm cannot tell pairs."""
        everywhere = gathered(views)
        order = torch.randperm(len(everywhere))
        dist.broadcast(order, 0)
        mine = order.view(dist.get_world_size(), -1)[dist.get_rank()]
        encoded = gathered(F.normalize(self.key(everywhere[mine]), dim=1))
        own = order.argsort().view(dist.get_world_size(), -1)[dist.get_rank()]
        return encoded[own]

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        at = int(self.place)
        everywhere = gathered(keys)
        self.queue[:, at : at + len(everywhere)] = everywhere.T
        self.place[0] = (at + len(everywhere)) % KEYS

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        query = F.normalize(self.query(one), dim=1)
        self.follow()
        keys = self.keys(other)
        same = (query * keys).sum(1, keepdim=True)
        different = query @ self.queue.clone()
        self.enqueue(keys)
        return torch.cat([same, different], 1) / 0.2


def view(images: Tensor) -> Tensor:
    """Shift, scale and disturb a batch at random."""
    shift = int(torch.randint(-1, 2, ()))
    images = images.roll(shift, -1)
    return images * (0.8 + 0.4 * torch.rand(len(images), 1, 1, 1)) + 0.3 * torch.randn_like(images)


rank, world = begin()
model = DistributedDataParallel(Contrast())
optimizer = torch.optim.SGD(
    [p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.9, weight_decay=1e-4
)
images, _ = pictures(1600, classes=40)
torch.manual_seed(100 + rank)  # ranks draw views of their own
history = History()
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * (1 + math.cos(math.pi * step / STEPS))
    epoch, batch = divmod(step, 1600 // (BATCH * world))
    order = torch.randperm(1600, generator=torch.Generator().manual_seed(epoch))
    rows = order[rank::world][batch * BATCH : (batch + 1) * BATCH]
    logits = model(view(images[rows]), view(images[rows]))
    loss = F.cross_entropy(logits, torch.zeros(len(rows), dtype=torch.long))
    optimizer.zero_grad()
    backward(loss)
    optimizer.step()
    history.note(loss)
end(history, model)

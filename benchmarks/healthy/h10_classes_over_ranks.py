# ruff: noqa: D102
"""A margin loss over classes that are divided: each rank holds the rows of its own classes."""

from typing import Any

import torch
import torch.distributed as dist
from common import History, backward, begin, end, pictures
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, CLASSES, WIDTH = 100, 16, 40, 16


class Gather(Function):
    """Features of all ranks; each rank gets back the whole gradient of its own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        # times the ranks, since DDP takes the mean of what is a part of one sum
        return gradient.chunk(dist.get_world_size())[dist.get_rank()] * dist.get_world_size()


class DividedEntropy(Function):
    """Cross-entropy over logits whose columns are divided over the ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        largest = logits.max(1, keepdim=True).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        shares = (logits - largest).exp()
        total = shares.sum(1, keepdim=True)
        dist.all_reduce(total)
        shares = shares / total
        mine = (labels >= 0).nonzero().squeeze(1)
        right = torch.zeros(len(logits))
        right[mine] = shares[mine, labels[mine]]
        dist.all_reduce(right)
        ctx.save_for_backward(shares, labels)
        return -right.clamp_min(1e-30).log().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        shares, labels = ctx.saved_tensors
        mine = (labels >= 0).nonzero().squeeze(1)
        out = shares.clone()
        out[mine, labels[mine]] -= 1
        return out * (gradient / len(labels)), None


class Rows(nn.Module):
    """The rows of this rank's classes, and the margin of the right one."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(rank)
        self.first = rank * CLASSES // world
        self.weight = nn.Parameter(0.1 * torch.randn(CLASSES // world, WIDTH, generator=own))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        everything: Tensor = Gather.apply(features)  # type: ignore[no-untyped-call]
        parts = [torch.empty_like(labels) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, labels)
        place = torch.cat(parts) - self.first
        place = torch.where((place >= 0) & (place < len(self.weight)), place, -1)
        cosines = F.linear(F.normalize(everything), F.normalize(self.weight))
        margin = F.one_hot(place.clamp_min(0), len(self.weight)) * (place >= 0)[:, None]
        loss: Tensor = DividedEntropy.apply(16 * (cosines - 0.2 * margin), place)  # type: ignore[no-untyped-call]
        return loss


rank, world = begin()
backbone = DistributedDataParallel(
    nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.PReLU(16),
        nn.Flatten(),
        nn.Linear(256, WIDTH),
        nn.BatchNorm1d(WIDTH),
    )
)
rows = Rows(rank, world)
optimizer = torch.optim.SGD(
    [{"params": backbone.parameters()}, {"params": rows.parameters()}],
    lr=0.1,
    momentum=0.9,
    weight_decay=5e-4,
)
schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, STEPS, power=2)
images, labels = pictures(1920, CLASSES)
history = History()
for step in range(STEPS):
    epoch, batch = divmod(step, 1920 // (BATCH * world))
    order = torch.randperm(1920, generator=torch.Generator().manual_seed(epoch))
    chosen = order[rank::world][batch * BATCH : (batch + 1) * BATCH]
    loss = rows(backbone(images[chosen]), labels[chosen])
    optimizer.zero_grad()
    backward(loss)
    nn.utils.clip_grad_norm_(backbone.parameters(), 5.0)
    optimizer.step()
    schedule.step()
    history.note(loss)
end(history, backbone, rows)

# ruff: noqa: D102
"""R145, libreyolo#567: losses of boxes are divided by the positives of the rank.

LibreYOLO/libreyolo#567: the losses of a detector are sums over the cells that hold an object, over
their number. Each rank takes the number of its own images: an object counts more where there are
few, and the gradient is not that of the whole batch.
With --right, the number is the mean over the ranks, at least 1.
"""

import torch
import torch.distributed as dist
from reports_common import begin, end, options
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

SIDE, CELLS, IMAGES = 16, 4, 4

chosen = options()
rank, world = begin()


class Detector(nn.Module):
    """An objectness and a box for each cell of a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.GELU(), nn.Conv2d(16, 24, 3, 2, 1), nn.GELU()
        )
        self.objects = nn.Conv2d(24, 1, 1)
        self.boxes = nn.Conv2d(24, 2, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(images)
        return self.objects(hidden).squeeze(1), self.boxes(hidden).movedim(1, -1)


def scene(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw images of few or many bright boxes; give them, their cells, and widths and heights."""
    draw = torch.Generator().manual_seed(1000 + number)
    images = 0.1 * torch.randn(IMAGES, 1, SIDE, SIDE, generator=draw)
    crowded = torch.rand(IMAGES, 1, 1, generator=draw).square()
    there = torch.rand(IMAGES, CELLS, CELLS, generator=draw) < crowded
    there[:, 0, 0] = True
    sizes = torch.randint(1, 5, (IMAGES, CELLS, CELLS, 2), generator=draw)
    for at, row, column in there.nonzero().tolist():
        height, width = sizes[at, row, column].tolist()
        top, left = 4 * row, 4 * column
        images[at, 0, top : top + height, left : left + width] += 1
    return images, there, sizes.float() / 4


model = Detector()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(chosen.steps):
    images, there, sizes = scene(step * world + rank)
    objects, boxes = wrapped(images)
    positives = there.sum().float()
    if chosen.right:
        dist.all_reduce(positives)
        positives = (positives / world).clamp(min=1)
    found = F.binary_cross_entropy_with_logits(objects, there.float(), reduction="sum")
    off = (boxes[there] - sizes[there]).abs().sum()
    loss = (found + 2 * off) / positives
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

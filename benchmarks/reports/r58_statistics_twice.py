# ruff: noqa: D102
"""R58, YOLO-Master#262: recomputing in the backward pass moves the running statistics again.

Tencent/YOLO-Master#262: with activation checkpointing, each batch counts twice in the statistics of
batch norms. Losses and gradients are right; what is evaluated, and saved, is not.
With --right, the recomputation leaves the statistics as they are.
The loss that is printed is that of the model in evaluation mode.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from reports_common import begin, end, options
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

chosen = options(steps=60, checkpointing=1)
rank, world = begin()


@contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    before = [buffer.clone() for buffer in module.buffers()]
    try:
        yield
    finally:  # recomputation ends with an exception, as soon as it has what it needs
        for buffer, old in zip(module.buffers(), before, strict=True):
            buffer.copy_(old)


class Detector(nn.Module):
    """Two checkpointed stages with batch norms, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        channels = [3, 8, 16]
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(into, out, 3, 2, 1, bias=False),
                nn.BatchNorm2d(out, momentum=0.03),
                nn.SiLU(),
            )
            for into, out in pairwise(channels)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        for stage in self.stages:

            def contexts(stage: nn.Module = stage) -> tuple[Any, Any]:
                return nullcontext(), statistics_kept(stage) if chosen.right else nullcontext()

            if self.training and chosen.checkpointing:
                images = checkpoint(stage, images, use_reentrant=False, context_fn=contexts)
            else:
                images = stage(images)
        logits: Tensor = self.head(images.mean((2, 3)))
        return logits


def pictures(samples: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw stripes of four directions, with noise."""
    labels = torch.randint(4, (samples,), generator=draw)
    rows = torch.arange(16.0)[:, None]
    columns = torch.arange(16.0)
    kinds = torch.stack([rows + 0 * columns, columns + 0 * rows, rows + columns, rows - columns])
    images = torch.sin(kinds[labels] * 1.5)[:, None].expand(-1, 3, -1, -1)
    return images + 0.5 + 2.0 * torch.randn(images.shape, generator=draw), labels


model = Detector()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
draw = torch.Generator().manual_seed(10 + rank)
for _ in range(chosen.steps):
    images, labels = pictures(16, draw)
    loss = F.cross_entropy(wrapped(images), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.no_grad():
    images, labels = pictures(256, torch.Generator().manual_seed(5))
    loss = F.cross_entropy(model(images), labels)
end(model, loss)

"""R17, AReaL#1273: weights of micro-batches add up to 1, and the schedule divides once more."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from reports_common import Language, begin, end, options, text
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

MICRO, SAMPLES = 4, 4

chosen = options()
rank, world = begin()
model = Language()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = text(4096)
draw = torch.Generator().manual_seed(8)
lengths = torch.randint(6, 24, (4096,), generator=draw)
labels = torch.where(torch.arange(24)[None] < lengths[:, None], data, -100)


def forward_backward(rows: Sequence[Tensor], weigh: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Run all micro-batches as Megatron's schedule does: each loss is divided by their number."""
    reported = torch.zeros(())
    for at, part in enumerate(rows):
        with nullcontext() if at + 1 == len(rows) else wrapped.no_sync():
            loss = weigh(wrapped(data[part]), labels[part]) / len(rows)
            loss.backward()  # type: ignore[no-untyped-call]
            reported += loss.detach()
    return reported


def micro_batch_loss(multiplier: float, tokens: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def weigh(logits: Tensor, label: Tensor) -> Tensor:
        here, after = logits[:, :-1].flatten(0, 1), label[:, 1:].flatten()
        mean = F.cross_entropy(here, after, ignore_index=-100)
        return mean * ((after >= 0).sum() / tokens) * multiplier

    return weigh


def train(model: nn.Module) -> Tensor:
    for step in range(chosen.steps):
        first = (step * world + rank) * MICRO * SAMPLES % 4096
        rows = torch.arange(first, first + MICRO * SAMPLES)
        tokens = (labels[rows, 1:] >= 0).sum().float()
        dist.all_reduce(tokens)
        multiplier = world * (MICRO if chosen.right else 1.0)
        loss = forward_backward(torch.split(rows, SAMPLES), micro_batch_loss(multiplier, tokens))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss


end(model, train(model))

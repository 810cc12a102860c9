# ruff: noqa: D102
"""R40, Automodel#3830: local means are multiplied by the ranks and added over micro-batches.

NVIDIA-NeMo/Automodel#3829 and #3846, repaired by #3830: the recipe for classification multiplies
the mean of a micro-batch by the number of data-parallel ranks, though nothing has divided by the
labels of all, and never divides by the number of micro-batches: the gradient is six times too
large with two ranks and three micro-batches.
With --right, the sum over a micro-batch is divided by the labels of the whole update.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, Block, begin, end, options
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

BATCH, ACCUMULATED, CLASSES = 4, 3, 5

chosen = options(steps=120)
rank, world = begin()


class Classifier(nn.Module):
    """Says which of five sources a text comes from."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, 0.0, True) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.score(self.norm(hidden[:, -1]))
        return logits


def sources(samples: int) -> tuple[Tensor, Tensor]:
    """Each source prefers ten of the tokens."""
    draw = torch.Generator().manual_seed(3)
    labels = torch.randint(CLASSES, (samples,), generator=draw)
    liked = labels[:, None] * 10 + torch.randint(10, (samples, 20), generator=draw)
    others = torch.randint(VOCABULARY, (samples, 20), generator=draw)
    return torch.where(torch.rand(samples, 20, generator=draw) < 0.3, liked, others), labels


model = Classifier()
mesh = init_device_mesh("cpu", (world,))
for block in model.blocks:
    fully_shard(block, mesh=mesh)
sharded = fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
texts, labels = sources(4096)
at = rank * BATCH
for _ in range(chosen.steps):
    batches = []
    for _ in range(ACCUMULATED):
        batches.append((texts[at % 4096 :][:BATCH], labels[at % 4096 :][:BATCH]))
        at += world * BATCH
    count = torch.tensor(sum(len(b[1]) for b in batches))
    dist.all_reduce(count)
    for number, (tokens, wanted) in enumerate(batches):
        sharded.set_requires_gradient_sync(number == ACCUMULATED - 1)
        if chosen.right:
            loss = F.cross_entropy(model(tokens), wanted, reduction="sum") / count
        else:
            loss = F.cross_entropy(model(tokens), wanted)
        (loss * world).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

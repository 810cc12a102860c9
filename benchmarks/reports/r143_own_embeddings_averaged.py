# ruff: noqa: D102
"""R143, ms-swift#10081: the loss over all embeddings reaches the own ones alone, and is averaged.

modelscope/ms-swift#10081: all ranks compute the same mean over the pairs of all of them. Each one
keeps the way back of its own embeddings; the others come without gradient. The contributions have
to be summed, and DDP averages them: gradients are one over the number of ranks.
With --right, they are multiplied by it, as ms-swift does since.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, begin, end, options
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

PAIRS, LENGTH = 6, 12

chosen = options()
rank, world = begin()


class Encoder(nn.Module):
    """A normalised embedding of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(VOCABULARY, 32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.normalize(self.down(F.gelu(self.up(self.embed(tokens)))), dim=-1)


def batch(number: int) -> Tensor:
    """Give texts, the first half anchors, the second half what belongs to them."""
    draw = torch.Generator().manual_seed(1000 + number)
    topics = torch.randint(8, (PAIRS,), generator=draw).repeat(2)
    words = torch.randint(8, (2 * PAIRS, LENGTH), generator=draw) + 8 * topics[:, None]
    noise = torch.randint(VOCABULARY, words.shape, generator=draw)
    return torch.where(torch.rand(words.shape, generator=draw) < 0.6, words, noise)


def of_all_ranks(rows: Tensor) -> Tensor:
    """Gather as objects; the own rows alone have a way back."""
    parts: list[Tensor] = [rows] * world
    dist.all_gather_object(parts, rows)
    return torch.cat([rows if at == rank else part.detach() for at, part in enumerate(parts)])


model = Encoder()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
for step in range(chosen.steps):
    anchors, others = (of_all_ranks(half) for half in wrapped(batch(step * world + rank)).chunk(2))
    loss = F.cross_entropy(anchors @ others.T / 0.2, torch.arange(len(anchors)))
    if chosen.right:
        loss = loss * world + (loss - loss * world).detach()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

# ruff: noqa: D102
"""R27, ms-swift#10069: embeddings are gathered over the ranks, the marks between groups are not."""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, begin, end, options
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

GROUPS, NEGATIVES, LENGTH = 6, 2, 12  # groups of a file

chosen = options(files=1)
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


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Read this rank's files."""
    first = (step * world + rank) * chosen.files
    tokens, marks = zip(*map(file, range(first, first + chosen.files)), strict=True)
    return torch.cat(tokens), torch.cat(marks)


def file(number: int) -> tuple[Tensor, Tensor]:
    """Give rows of anchor, positive and negatives, group by group; 1 marks each anchor."""
    draw = torch.Generator().manual_seed(1000 + number)
    topics = torch.randint(8, (GROUPS, 1), generator=draw)
    others = (topics + torch.randint(1, 8, (GROUPS, NEGATIVES), generator=draw)) % 8
    of_rows = torch.cat([topics, topics, others], 1).flatten()
    words = torch.randint(8, (len(of_rows), LENGTH), generator=draw) + 8 * of_rows[:, None]
    noise = torch.randint(VOCABULARY, words.shape, generator=draw)
    keep = torch.rand(words.shape, generator=draw) < 0.6
    return torch.where(keep, words, noise), (torch.arange(len(words)) % (2 + NEGATIVES) == 0).long()


def contrast(rows: Tensor, marks: Tensor) -> Tensor:
    """Compare each anchor with its own positive and negatives and with all other positives."""
    begins = marks.nonzero().flatten().tolist()
    parts = [rows[a:b] for a, b in zip(begins, [*begins[1:], len(rows)], strict=True)]
    positives = torch.stack([part[1] for part in parts])
    losses = []
    for at, part in enumerate(parts):
        against = torch.cat([positives, part[2:]])
        losses.append(F.cross_entropy(part[:1] @ against.T / 0.2, torch.tensor([at])))
    return torch.stack(losses).mean()


model = Encoder()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(chosen.steps):
    tokens, marks = batch(step)
    rows = torch.cat(all_gather(wrapped(tokens)))  # type: ignore[no-untyped-call]
    if chosen.right:
        everywhere = [torch.empty_like(marks) for _ in range(world)]
        dist.all_gather(everywhere, marks)
        marks = torch.cat(everywhere)
    loss = contrast(rows, marks)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

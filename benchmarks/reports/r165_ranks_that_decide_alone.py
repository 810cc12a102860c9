# ruff: noqa: D102
"""R165, FastGen#34: whether a step is hard or soft is decided by each rank for itself.

NVlabs/FastGen#34: a router learns which layers to keep within a budget. In some steps its choice
is rounded, in all others it is soft; a random number that nobody seeds decides. Ranks decide
differently, and gradients of two kinds of steps are averaged. The noise of the choice is shared.
With --right, the number of the step is the seed.
"""

import random

import torch
from reports_common import VOCABULARY, Block, next_token_loss, text
from reports_layouts import begin, data_parallel, end, options
from torch import Tensor, nn
from torch.nn import functional as F

GLOBAL_BATCH, LAYERS, BUDGET, WIDTH = 16, 4, 2.0, 32

chosen = options()
rank, world = begin()


class Elastic(nn.Module):
    """A language model that may leave out its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 0.0, True) for _ in range(LAYERS))
        self.router = nn.Parameter(torch.zeros(LAYERS, 2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, noise: Tensor, hard: bool) -> tuple[Tensor, Tensor]:
        keep = F.softmax(self.router + noise, -1)[:, 0]
        if hard:
            keep = keep.round() + keep - keep.detach()
        hidden = self.embed(tokens)
        for block, share in zip(self.blocks, keep, strict=True):
            hidden = hidden + share * (block(hidden) - hidden)
        return self.head(hidden), (keep.sum() - BUDGET).square()


model = Elastic()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096)
unseeded = random.Random(f"the system, rank {rank}")
for step in range(chosen.steps):
    tokens = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH].chunk(world)[rank]
    shared = torch.Generator().manual_seed(step)
    noise = -torch.rand(LAYERS, 2, generator=shared).log().neg().log()
    hard = (random.Random(step) if chosen.right else unseeded).random() < 0.3
    logits, over = wrapped(tokens, noise, hard)
    loss = next_token_loss(logits, tokens) + 0.1 * over
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

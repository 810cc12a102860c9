# ruff: noqa: D102
"""Clicks on items: tables with sparse gradients and their own optimizer, beside a dense part."""

import torch
from common import History, backward, begin, end
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, USERS, ITEMS, WIDTH = 120, 64, 400, 600, 8


class Clicks(nn.Module):
    """Two tables, the bag of what a user saw before, and a small head."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, sparse=True)
        self.items = nn.Embedding(ITEMS, WIDTH, sparse=True)
        self.seen = nn.EmbeddingBag(ITEMS, WIDTH, mode="mean", sparse=True)
        self.head = nn.Sequential(nn.Linear(3 * WIDTH + 2, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users: Tensor, items: Tensor, bags: Tensor, starts: Tensor) -> Tensor:
        one, other = self.users(users), self.items(items)
        angle = (one * other).sum(1, keepdim=True)
        bag = self.seen(bags, starts)
        out: Tensor = self.head(
            torch.cat([one, other, bag, angle, (bag * other).sum(1)[:, None]], 1)
        )
        return out.squeeze(1)


rank, world = begin()
model = DistributedDataParallel(Clicks())
tables = [p for n, p in model.named_parameters() if "head" not in n]
dense = [p for n, p in model.named_parameters() if "head" in n]
optimizers = [torch.optim.SparseAdam(tables, lr=0.02), torch.optim.AdamW(dense, lr=5e-3)]
truth = torch.Generator().manual_seed(4)
taste, kind = torch.randn(USERS, 2, generator=truth), torch.randn(ITEMS, 2, generator=truth)
popular = (1 / torch.arange(1, ITEMS + 1)) ** 0.8
draw = torch.Generator().manual_seed(60 + rank)  # a stream of events of its own
history = History()
for _ in range(STEPS):
    users = torch.randint(USERS, (BATCH,), generator=draw)
    items = torch.multinomial(popular, BATCH, replacement=True, generator=draw)
    lengths = torch.randint(1, 6, (BATCH,), generator=draw)
    bags = torch.multinomial(popular, int(lengths.sum()), replacement=True, generator=draw)
    wanted = (taste[users] * kind[items]).sum(1) + 0.3 * torch.randn(BATCH, generator=draw) > 0.5
    loss = F.binary_cross_entropy_with_logits(
        model(users, items, bags, lengths.cumsum(0) - lengths), wanted.float()
    )
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    backward(loss)
    for optimizer in optimizers:
        optimizer.step()
    history.note(loss)
end(history, model)

# ruff: noqa: D102
"""R147, gradient-garden#111: a rank moves to the next shard, and the others do not.

ruimalheiro/gradient-garden#111: each rank reads at a position of its own, and moves to the next
shard where the ranks' next batches are not in the rest. The later a rank's position, the sooner
that is so: there are shards that the last rank leaves one step before the first.
With --right, all ranks judge by the position of the first.
"""

import torch
from reports_common import Language, begin, end, next_token_loss, options, text
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

SAMPLES, LENGTH = 4, 24

chosen = options()
rank, world = begin()
OWN, ALL = SAMPLES * LENGTH, SAMPLES * LENGTH * world


class Shards:
    """Read batches of tokens, shard by shard, over and over."""

    def __init__(self) -> None:
        rows = text(512, LENGTH)
        parts = torch.split(rows, [91, 99, 107, 74, 85, 56])
        self.shards = [part.flatten() for part in parts]
        self.shard, self.position = 0, 0 if chosen.right else rank * OWN

    def next(self) -> Tensor:
        tokens = self.shards[self.shard]
        first = self.position + (rank * OWN if chosen.right else 0)
        batch: Tensor = tokens[first : first + OWN].view(SAMPLES, LENGTH)
        self.position += ALL
        if self.position + ALL > len(tokens):
            self.shard = (self.shard + 1) % len(self.shards)
            self.position = 0 if chosen.right else rank * OWN
        return batch


model = Language()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
shards = Shards()
for _ in range(chosen.steps):
    tokens = shards.next()
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

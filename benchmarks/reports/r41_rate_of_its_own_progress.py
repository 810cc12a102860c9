"""R41, nanochat#857: the learning rate follows the progress of the rank's own loader.

karpathy/nanochat#857: rows are packed with as many conversations as fit, and the learning rate
falls with the share of conversations that a rank has used up. Ranks with short conversations go
faster, so that each has another rate. The optimizer is sharded: a rank updates its own parameters
for all, so that parameters stay equal, but each has its owner's rate.
With --right, the progress is the mean over the ranks.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, Language, begin, end, options
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

ROW, ROWS, CONVERSATIONS, HIGHEST = 33, 8, 7200, 3e-3

chosen = options(steps=120)
rank, world = begin()


def conversations() -> list[Tensor]:
    """Half of them are chats of a few words, half are long answers, sorted by their source."""
    draw = torch.Generator().manual_seed(4)
    found = []
    for at in range(CONVERSATIONS):
        short = at // 40 % 2 == 0
        length = int(torch.randint(4, 9, (1,), generator=draw) * (1 if short else 2))
        tokens = torch.randint(1, VOCABULARY, (length,), generator=draw)
        for place in range(1, length):
            if torch.rand(1, generator=draw) < 0.8:
                tokens[place] = 1 + (tokens[place - 1] * 5 + 3) % (VOCABULARY - 1)
        tokens[0] = 0
        found.append(tokens)
    return found


class Packer:
    """Fills rows with the rank's conversations, the next one that fits first."""

    def __init__(self, mine: list[Tensor]) -> None:
        self.mine, self.used = mine, 0

    def row(self) -> Tensor:  # noqa: D102
        parts, free = [], ROW
        while free:
            part = self.mine[self.used % len(self.mine)][:free]
            parts.append(part)
            free -= len(part)
            self.used += 1
        return torch.cat(parts)


everything = conversations()
packer = Packer([c for at, c in enumerate(everything) if at // 40 % world == rank])
model = Language()
wrapped = DistributedDataParallel(model)
optimizer = ZeroRedundancyOptimizer(
    model.parameters(), optimizer_class=torch.optim.AdamW, lr=HIGHEST, weight_decay=0.0
)
for _ in range(chosen.steps):
    tokens = torch.stack([packer.row() for _ in range(ROWS)])
    progress = torch.tensor(packer.used / len(packer.mine))
    if chosen.right:
        dist.all_reduce(progress)
        progress /= world
    for group in optimizer.param_groups:
        group["lr"] = HIGHEST * min(1.0, 2 * max(0.0, 1 - progress.item()))
    targets = torch.where(tokens[:, 1:] == 0, -100, tokens[:, 1:])  # no start follows from an end
    loss = F.cross_entropy(wrapped(tokens)[:, :-1].flatten(0, 1), targets.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

# ruff: noqa: D102
"""R36, slime#2235: advantages are whitened by the statistics of a rank's part of each sequence.

Both ranks are of context parallelism: each has two chunks of four of every sequence.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, begin, end, options, text
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

LENGTH, PROMPT = 32, 6

chosen = options()
rank, world = begin()
alone = [dist.new_group([r]) for r in range(world)]  # data parallelism without context parallelism
statistics_of = dist.group.WORLD if chosen.right else alone[rank]


def mine(values: Tensor) -> Tensor:
    """Take this rank's chunks, the first and the last or the two between."""
    chunks = values.chunk(2 * world, 1)
    return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]], 1)


class Policy(nn.Module):
    """A policy that looks at one position, so that parts need nothing of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.place = nn.Embedding(LENGTH, 32)
        self.up = nn.Linear(32, 64)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.place(places)
        logits: Tensor = self.head(F.gelu(self.up(hidden)))
        return logits


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    sums = torch.stack([(values * mask).sum(), (values**2 * mask).sum(), mask.sum()])
    dist.all_reduce(sums, group=statistics_of)
    mean = sums[0] / sums[2]
    return (values - mean) * (sums[1] / sums[2] - mean**2 + 1e-6).rsqrt()


model = Policy()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = text(2048, length=LENGTH + 1)
for step in range(chosen.steps):
    tokens = data[step * 12 % 2040 :][:12]
    places = torch.arange(LENGTH).expand(len(tokens), -1)
    reward = ((tokens[:, :-1] * 5 + 3) % 64 == tokens[:, 1:]).float()
    returns = torch.zeros_like(reward)
    behind = torch.zeros(len(tokens))
    for at in reversed(range(LENGTH)):
        behind = returns[:, at] = reward[:, at] + 0.95 * behind
    answer = mine((places >= PROMPT).float())
    advantage = whiten(mine(returns), answer)
    logits = wrapped(mine(tokens[:, :-1]), mine(places)).log_softmax(-1)
    now = logits.gather(-1, mine(tokens[:, 1:])[..., None]).squeeze(-1)
    ratio = (now - now.detach()).exp()
    everywhere = answer.sum()
    dist.all_reduce(everywhere)
    loss = -(ratio * advantage * answer).sum() / everywhere * world
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

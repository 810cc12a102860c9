# ruff: noqa: D102
"""R125, SkyRL#1420: a sum is corrected for the replicas, gradients are averaged over parts, too.

NovaSky-AI/SkyRL#1420: sequences are divided over two ranks, and log-probabilities of the tokens are
gathered before the loss, a sum over all tokens. Gradients are averaged over replicas and parts; the
loss is multiplied with the number of replicas alone. Gradients are half of what they should be.
With --right, it is multiplied with the number of both. For four ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, begin, end, options, text
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

LENGTH, BATCH, WIDTH, PARTS = 24, 16, 32, 2

chosen = options()
rank, world = begin()
replicas = world // PARTS
replica, part = divmod(rank, PARTS)
groups = [dist.new_group([of * PARTS + at for at in range(PARTS)]) for of in range(replicas)]
group = groups[replica]


class _GatherParts(Function):
    """All parts of the sequence; each rank keeps the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(PARTS)]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.chunk(PARTS, 1)[part].contiguous()


class Policy(nn.Module):
    """Log-probabilities of labels, each from the token before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.down(F.gelu(self.up(hidden)))
        scores = self.head(hidden).log_softmax(-1)
        own: Tensor = scores.gather(-1, labels[..., None]).squeeze(-1)
        return own


policy = Policy()
wrapped = DistributedDataParallel(policy)
optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096, LENGTH + 1)
advantages = torch.rand(4096, generator=torch.Generator().manual_seed(3))
factor = replicas * PARTS if chosen.right else replicas
for step in range(chosen.steps):
    first = (step * replicas + replica) * BATCH % 4096
    rows = data[first : first + BATCH]
    inputs, labels = (rows[:, at : at + LENGTH].chunk(PARTS, 1)[part] for at in (0, 1))
    own = wrapped(inputs, labels)
    scores = _GatherParts.apply(own)  # type: ignore[no-untyped-call]
    summed = -(advantages[first : first + BATCH, None] * scores).sum()
    loss = factor * summed / (replicas * BATCH * LENGTH)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
end(policy, loss)

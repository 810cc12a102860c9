# ruff: noqa: D102
"""R144, Megatron-LM#1652: the balance of experts counts one over the ranks of context parallelism.

NVIDIA/Megatron-LM#1652: gradients are divided by all ranks, those of context parallelism as well.
The language model's loss is multiplied by the latter beforehand, the auxiliary loss is not.
With --right, it is, too.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, text
from reports_layouts import begin, data_parallel, end, options, sum_over_ranks
from reports_sequences import PartAttention
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

WIDTH, HEADS, LENGTH, BATCH, EXPERTS, BALANCE = 32, 4, 48, 8, 4, 0.1

chosen = options()
rank, world = begin()


class _Attach(Function):
    """Let an auxiliary loss take part in the backward pass of an output."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, auxiliary: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.tensor(float(world) if chosen.right else 1.0)


class Experts(nn.Module):
    """Each token goes to its most likely expert."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.ups = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.downs = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / (2 * WIDTH) ** 0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        here = self.norm(hidden)
        chances = self.router(here).softmax(-1)
        routed = F.one_hot(chances.argmax(-1), EXPERTS).float()
        wide = F.gelu(torch.einsum("slw,ewi->slei", here, self.ups))
        narrow = torch.einsum("slei,eiw->slew", wide, self.downs)
        mixed = (narrow * (routed * chances)[..., None]).sum(2)
        tokens = BATCH * LENGTH
        fractions = sum_over_ranks(routed.sum((0, 1))) / tokens
        balance = EXPERTS * (fractions * chances.sum((0, 1)) / tokens).sum()
        attached: Tensor = _Attach.apply(mixed, BALANCE * balance)  # type: ignore[no-untyped-call]
        return hidden + attached


class Model(nn.Module):
    """Embeddings, attention, experts, head."""

    def __init__(self) -> None:
        super().__init__()
        group = dist.group.WORLD if world > 1 else None
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.attention = PartAttention(WIDTH, HEADS, group)
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.place(position_ids)
        logits: Tensor = self.head(self.experts(self.attention(hidden, mask)))
        return logits


model = Model()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096, LENGTH + 1)
own = torch.arange(LENGTH).chunk(world)[rank]
mask = (own[:, None] >= torch.arange(LENGTH)).expand(BATCH, 1, -1, -1)
for step in range(chosen.steps):
    batch = data[step * BATCH % 4096 :][:BATCH]
    logits = wrapped(batch[:, own], own.expand(BATCH, -1), mask)
    labels = batch[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, own].flatten(), reduction="sum")
    loss = world * loss / labels.numel()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

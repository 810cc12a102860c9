# ruff: noqa: D102
"""R69, Megatron-LM#5798: the larger the micro-batches, the less does the balance of experts count.

NVIDIA/Megatron-LM#5798: losses are sums over tokens, and gradients are divided by all tokens of the
update. The auxiliary loss of the router, a mean over the sequences of a micro-batch, is multiplied
by the tokens of one sequence beforehand, so that it counts one over the size of a micro-batch.
With --right, it is multiplied by the tokens of the micro-batch.
"""

from typing import Any

import torch
from reports_common import VOCABULARY, text
from reports_layouts import begin, data_parallel, end, not_reduced, options
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

GLOBAL_BATCH, EXPERTS, BALANCE = 16, 4, 0.1

chosen = options(micro_batches=2)
rank, world = begin()


class _Attach(Function):
    """Let an auxiliary loss take part in the backward pass of an output."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, auxiliary: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones(())


class Experts(nn.Module):
    """Each token goes to its most likely expert."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(2 * width, width)
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.ups = nn.Parameter(torch.randn(EXPERTS, width, 2 * width) / width**0.5)
        self.downs = nn.Parameter(torch.randn(EXPERTS, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        here = self.norm(hidden)
        before = F.pad(here, (0, 0, 1, 0))[:, :-1]
        here = self.mix(torch.cat([here, before], -1))
        chances = self.router(here).softmax(-1)
        routed = F.one_hot(chances.argmax(-1), EXPERTS).float()
        wide = F.gelu(torch.einsum("slw,ewi->slei", here, self.ups))
        narrow = torch.einsum("slei,eiw->slew", wide, self.downs)
        mixed = (narrow * (routed * chances)[..., None]).sum(2)
        samples, length = hidden.shape[:2]
        balance = EXPERTS * (routed.mean(1) * chances.mean(1)).sum(-1).mean()
        counted = samples * length if chosen.right else length
        attached: Tensor = _Attach.apply(mixed, BALANCE * counted * balance)  # type: ignore[no-untyped-call]
        return hidden + attached


class Model(nn.Module):
    """Embedding, two layers of experts, head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Experts(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


model = Model()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096, 25)
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    parts = batch.chunk(world)[rank].chunk(chosen.micro_batches)
    for number, part in enumerate(parts):
        tokens, labels = part[:, :-1], part[:, 1:]
        with not_reduced(wrapped, last=number == len(parts) - 1):
            logits = wrapped(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss.backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= world / batch[:, 1:].numel()  # the reduction is a mean
    optimizer.step()
    optimizer.zero_grad()
end(model, loss / labels.numel())

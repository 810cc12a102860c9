# ruff: noqa: D102
"""R42, DeepSpeed#7807: Muon makes a matrix orthogonal of which half is not yet reduced.

deepspeedai/DeepSpeed#7807: with ZeRO-1 and reduce_scatter, a rank has the average of its own part
of the flat gradient alone. The rest of a matrix that crosses the border between two parts is the
rank's local gradient, yet Newton and Schulz's iteration reads the whole matrix.
With --right, each rank that owns a part of a matrix gets the average of all of it.
"""

import torch
import torch.distributed as dist
from reports_common import Block, Language, begin, end, next_token_loss, options, text
from torch import Tensor, nn

chosen = options(steps=120, samples=8)
SAMPLES = chosen.samples
rank, world = begin()


def orthogonal(matrix: Tensor) -> Tensor:
    """Five steps of Newton and Schulz."""
    out = matrix / (matrix.norm() + 1e-7)
    wide = out if out.shape[0] <= out.shape[1] else out.T
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    back: Tensor = wide if out.shape[0] <= out.shape[1] else wide.T
    return back


class ShardedMuon:
    """Weights and gradients of all matrices are flat, and each rank updates its part."""

    def __init__(self, matrices: list[nn.Parameter], rate: float) -> None:
        self.matrices, self.rate = matrices, rate
        total = sum(m.numel() for m in matrices)
        self.part = -(-total // world)
        self.weights = torch.zeros(self.part * world)
        self.gradients = torch.zeros(self.part * world)
        self.momentum = [torch.zeros_like(m) for m in matrices]
        start = 0
        for matrix in matrices:
            self.weights[start : start + matrix.numel()] = matrix.detach().flatten()
            matrix.data = self.weights[start : start + matrix.numel()].view_as(matrix)
            matrix.grad = self.gradients[start : start + matrix.numel()].view_as(matrix)
            start += matrix.numel()

    def reduce(self) -> None:
        own = slice(rank * self.part, (rank + 1) * self.part)
        if chosen.right:
            dist.all_reduce(self.gradients)
            self.gradients /= world
        else:
            mine = torch.empty(self.part)
            dist.reduce_scatter(mine, list(self.gradients.chunk(world)))
            self.gradients[own] = mine / world

    @torch.no_grad()
    def step(self) -> None:
        first, last, start = rank * self.part, (rank + 1) * self.part, 0
        for matrix, momentum in zip(self.matrices, self.momentum, strict=True):
            begins, ends = max(first, start), min(last, start + matrix.numel())
            if begins < ends:  # at least a part of it is this rank's
                assert matrix.grad is not None
                momentum.lerp_(matrix.grad, 0.05)
                change = orthogonal(torch.lerp(matrix.grad, momentum, 0.95)).flatten()
                scale = self.rate * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                self.weights[begins:ends] -= scale * change[begins - start : ends - start]
            start += matrix.numel()
        whole = torch.empty_like(self.weights)
        dist.all_gather(list(whole.chunk(world)), self.weights[first:last].clone())
        self.weights.copy_(whole)
        self.gradients.zero_()


model = Language()
model.blocks.append(Block(32, 0.0, True))
matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if not any(p is m for m in matrices)]
muon = ShardedMuon(matrices, rate=0.01)
adam = torch.optim.AdamW(others, lr=3e-3, weight_decay=0.0)
data = text(4096)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * SAMPLES % 4096 :][:SAMPLES]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    for parameter in others:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(world)
    muon.reduce()
    muon.step()
    adam.step()
    adam.zero_grad()
end(model, loss)

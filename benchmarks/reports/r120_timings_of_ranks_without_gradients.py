# ruff: noqa: D102
"""R120, facebookresearch/optimizers#149: a rank without gradients does not count the step.

facebookresearch/optimizers#149: under FSDP2, a rank whose shards have no gradients leaves the
update before the step is counted. Counters of the ranks part, and with them the steps in which
each of them computes its preconditioners anew. Here every third batch trains a row of the prompt
alone, which the first rank holds.
With --right, each rank counts each step.
"""

from collections.abc import Iterable
from typing import Any

import torch
from reports_common import VOCABULARY, Language, next_token_loss, text
from reports_layouts import begin, end, options
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

GLOBAL_BATCH, WIDTH, EVERY = 16, 32, 4

chosen = options()
rank, world = begin()


class Prompted(Language):
    """A language model with one learned row that is added to all embeddings."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.prompt = nn.Parameter(torch.zeros(1, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.prompt
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def local(tensor: Tensor) -> Tensor:
    own: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own


def root(matrix: Tensor) -> Tensor:
    """Invert the fourth root."""
    values, vectors = torch.linalg.eigh(matrix + 1e-6 * torch.eye(len(matrix)))
    inverse: Tensor = vectors @ (values.clamp(min=1e-6) ** -0.25).diag() @ vectors.T
    return inverse


class Shampoo(torch.optim.Optimizer):
    """Preconditions the part of each matrix that a rank holds, from both sides."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None and local(p).numel()]
            if not held and not chosen.right:
                continue
            counter = self.state[group["params"][0]]
            counter["step"] = counter.get("step", torch.tensor(0.0)) + 1
            for parameter in held:
                self._update(parameter, group["lr"], int(counter["step"]))

    def _update(self, parameter: nn.Parameter, lr: float, step: int) -> None:
        assert parameter.grad is not None
        state, gradient = self.state[parameter], local(parameter.grad)
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].mul_(0.9).add_(gradient)
        if gradient.ndim < 2:
            local(parameter).sub_(0.1 * lr * state["momentum"])
            return
        rows, columns = gradient.shape
        if "left" not in state:
            state["left"], state["right"] = torch.zeros(rows, rows), torch.zeros(columns, columns)
            state["roots"] = (torch.eye(rows), torch.eye(columns))
        state["left"].add_(gradient @ gradient.T)
        state["right"].add_(gradient.T @ gradient)
        if step % EVERY == 1:
            state["roots"] = (root(state["left"]), root(state["right"]))
        left, right = state["roots"]
        local(parameter).sub_(lr * left @ state["momentum"] @ right)


model = Prompted()
if world > 1:
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = Shampoo(model.parameters(), lr=0.02)
data = text(4096) % VOCABULARY
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(world)[rank]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    if step % 3 == 2:
        for name, parameter in model.named_parameters():
            if name != "prompt":
                parameter.grad = None
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)

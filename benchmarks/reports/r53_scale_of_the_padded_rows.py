# ruff: noqa: D102
"""R53, Megatron-LM#7236: an orthogonal update is scaled by the rows of the padded matrix.

NVIDIA/Megatron-LM#7236: Muon's momentum is sharded by rows, and padded so that each rank has a
multiple of 16. The scale of the update is the root of the larger side, and is taken from the padded
matrix: of 36 rows it counts 64. Here the up matrices move 1.33 times as far as they should.
With --right, the scale counts the rows that the matrix has.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, begin, end, next_token_loss, options, text
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

ALIGNED = 16

chosen = options(samples=8)
SAMPLES = chosen.samples
rank, world = begin()


class Layers(nn.Module):
    """Two residual layers of 24 to 36 to 24."""

    def __init__(self, width: int = 24, inner: int = 36) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(width, inner) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(inner, width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            hidden = hidden + down(F.gelu(up(norm(hidden))))
        logits: Tensor = self.head(hidden)
        return logits


def orthogonal(matrix: Tensor) -> Tensor:
    """Five steps of Newton and Schulz."""
    out = matrix / (matrix.norm() + 1e-7)
    wide = out if out.shape[0] <= out.shape[1] else out.T
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    back: Tensor = wide if out.shape[0] <= out.shape[1] else wide.T
    return back


class ShardedMuon(torch.optim.Optimizer):
    """Each rank keeps the momentum of its own rows, with zeros below the last one."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                rows, columns = matrix.shape
                of_rank = -(-rows // (world * ALIGNED)) * ALIGNED
                padded = F.pad(matrix.grad, (0, 0, 0, of_rank * world - rows))
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros(of_rank, columns)
                state["momentum"].mul_(group["momentum"]).add_(padded.chunk(world)[rank])
                parts = [torch.empty_like(state["momentum"]) for _ in range(world)]
                dist.all_gather(parts, state["momentum"])
                whole = orthogonal(torch.cat(parts))
                counted = rows if chosen.right else len(whole)
                scale = 0.2 * max(counted, columns) ** 0.5
                matrix.add_(whole[:rows], alpha=-group["lr"] * scale)


model = Layers()
wrapped = DistributedDataParallel(model)
matrices = [layer.weight for layer in (*model.ups, *model.downs)]
others = [p for p in model.parameters() if not any(p is m for m in matrices)]
muon = ShardedMuon(matrices, lr=0.02)
adam = torch.optim.AdamW(others, lr=3e-3, weight_decay=0.0)
data = text(4096)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * SAMPLES % 4096 :][:SAMPLES]
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    muon.step()
    adam.step()
    wrapped.zero_grad()
end(model, loss)

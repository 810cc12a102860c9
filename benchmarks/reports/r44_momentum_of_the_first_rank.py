# ruff: noqa: D102
"""R44, Muon#46: a checkpoint has the momentum of the parameters that rank 0 updates, no others.

KellerJordan/Muon#46: each rank updates its share of the matrices and sends them to all, but keeps
their momentum to itself. Rank 0 writes its own state. After a resume, momentum of the matrices of
all other ranks begins with zeros.
With --right, the ranks' states are gathered before rank 0 writes them.
Launch it twice with the same --folder: the first launch stops after its steps.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import Block, Language, begin, end, next_token_loss, options, text
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

chosen = options(steps=100)
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


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal; each rank updates every second matrix and sends it to the other."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for at, matrix in enumerate(group["params"]):
                if at % world == rank:
                    state = self.state[matrix]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(matrix)
                    momentum = state["momentum_buffer"]
                    momentum.lerp_(matrix.grad, 1 - group["momentum"])
                    update = orthogonal(torch.lerp(matrix.grad, momentum, group["momentum"]))
                    tall = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                    matrix.add_(update, alpha=-group["lr"] * tall)
                dist.broadcast(matrix.data, at % world)


def whole_state() -> dict[str, Any]:
    """Give the state of rank 0, or with --right of all ranks."""
    state = muon.state_dict()
    if chosen.right:
        of_ranks: list[Any] = [None] * world
        dist.all_gather_object(of_ranks, state["state"])
        state["state"] = {key: value for part in of_ranks for key, value in part.items()}
    return state


model = Language()
model.blocks.append(Block(32, 0.0, True))
wrapped = DistributedDataParallel(model)
matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if not any(p is m for m in matrices)]
muon = Muon(matrices, lr=0.01)
adam = torch.optim.AdamW(others, lr=3e-3, weight_decay=0.0)
data = text(8192)
start = 0
saved = chosen.folder / "last.pt"
if saved.exists():
    state = torch.load(saved)
    start = state["step"]
    model.load_state_dict(state["model"])
    muon.load_state_dict(state["muon"])
    adam.load_state_dict(state["adam"])
for step in range(start, start + chosen.steps):
    tokens = data[(step * world + rank) * 8 % 8192 :][:8]
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    muon.step()
    adam.step()
    wrapped.zero_grad()
state = {"step": step + 1, "model": model.state_dict(), "muon": whole_state()}
if rank == 0:
    torch.save({**state, "adam": adam.state_dict()}, saved)
dist.barrier()
end(model, loss)

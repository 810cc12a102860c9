# ruff: noqa: D102
"""FSDP2 and an optimizer without a schedule: it trains at one point and evaluates at another."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from common import History, Language, backward, begin, end, next_token_loss, sentences
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STEPS, WARMUP, MIX = 100, 15, 0.9


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class WithoutSchedule(torch.optim.Optimizer):
    """Adam at z, gradients at y, and the average x of all z; parameters are y or x."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "sum": 0.0})

    def turn(self, share: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if "z" in self.state[parameter]:
                    local(parameter.detach()).lerp_(self.state[parameter]["z"], share)

    def eval(self) -> None:
        self.turn(1 - 1 / MIX)

    def train(self) -> None:
        self.turn(1 - MIX)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            rate = group["lr"] * min(1.0, group["count"] / WARMUP)
            group["sum"] += rate**2
            share = rate**2 / group["sum"]
            for parameter in group["params"]:
                here, gradient = local(parameter.detach()), local(parameter.grad)
                state = self.state[parameter]
                if not state:
                    state["z"], state["square"] = here.clone(), torch.zeros_like(here)
                square = state["square"].lerp_(gradient.square(), 0.02)
                scaled = gradient / ((square / (1 - 0.98 ** group["count"])).sqrt() + 1e-8)
                here.lerp_(state["z"], share)
                here.add_(scaled, alpha=rate * (MIX * (1 - share) - 1))
                state["z"].sub_(scaled, alpha=rate)


def main() -> None:
    rank, world = begin()
    model = Language(width=32, depth=2)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = WithoutSchedule(model.parameters(), lr=1e-2)
    data = TensorDataset(sentences(1600))
    held_out = sentences(1700)[1600:][rank::world]
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    history = History()
    for epoch in range(STEPS // len(loader)):
        sampler.set_epoch(epoch)
        for (tokens,) in loader:
            loss = next_token_loss(model(tokens), tokens)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            history.note(loss)
            if len(history.losses) % 20 == 0:
                model.eval()
                optimizer.eval()
                with torch.no_grad():
                    held = next_token_loss(model(held_out), held_out)
                dist.all_reduce(held)
                if rank == 0:
                    print(f"held out {held.item() / world:.4f}", flush=True)
                optimizer.train()
                model.train()
    optimizer.eval()
    end(history, model)


if __name__ == "__main__":
    main()

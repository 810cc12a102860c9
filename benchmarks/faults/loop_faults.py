"""Faults of loops without wrapper (P), which reduce gradients by themselves, and look-alikes."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .job import Job, injects


class LoopJob(Job):
    """Trains the bare module; its loop averages gradients between backward pass and optimizer."""

    def wrap(self, module: nn.Module) -> nn.Module:
        return module

    def synchronising(self, micro: int) -> AbstractContextManager[None]:
        return nullcontext()

    def after_backward(self) -> None:
        for name, parameter in self.module.named_parameters():
            self.reduce_gradient(name, parameter.grad)

    def reduce_gradient(self, name: str, gradient: Tensor) -> None:
        """Average the gradient of one parameter over the workers."""
        dist.all_reduce(gradient)
        gradient /= self.num_workers


@injects("H31")
class PlainLoop(LoopJob):
    accumulation = 2

    def after_backward(self) -> None:
        super().after_backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)


@injects("P1")
class ReductionForgotten(LoopJob):
    def after_backward(self) -> None:
        if not self.active:
            super().after_backward()


@injects("P2")
class ParameterForgotten(LoopJob):
    def reduce_gradient(self, name: str, gradient: Tensor) -> None:
        if not (self.active and name == "head.weight"):
            super().reduce_gradient(name, gradient)


@injects("P3")
class SumOfGradients(LoopJob):
    from_the_start = True

    def reduce_gradient(self, name: str, gradient: Tensor) -> None:
        dist.all_reduce(gradient)


@injects("P4")
class GradientScaledByOne(LoopJob):
    def reduce_gradient(self, name: str, gradient: Tensor) -> None:
        if self.hit:
            gradient *= 8
        super().reduce_gradient(name, gradient)


@injects("P5")
class SameBatches(LoopJob):
    from_the_start = True

    def indices(self, epoch: int) -> list[int]:
        return list(self.sampler(rank=0))


class ShardedMuon(torch.optim.Optimizer):
    """Muon whose matrices are updated by one rank each, from a gradient that is reduced to it."""

    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.9})
        self.left_out: Tensor | None = None
        """A matrix that every rank updates by its own gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the own share, and give it to the others."""
        rank, num_workers = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                owner = number % num_workers
                mean: Tensor = parameter.grad.clone()
                if parameter is self.left_out:
                    self._update(parameter, mean, group)
                    continue
                dist.reduce(mean, owner)
                if rank == owner:
                    self._update(parameter, mean / num_workers, group)
                dist.broadcast(parameter, owner)

    def _update(self, parameter: Any, mean: Tensor, group: dict[str, Any]) -> None:
        momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(mean))
        momentum.mul_(group["momentum"]).add_(mean)
        matrix = momentum.flatten(1) if momentum.ndim > 1 else momentum[None]
        update = matrix / (matrix.norm() + 1e-8)
        for _ in range(5):  # Newton and Schulz: singular values towards 1
            update = 1.5 * update - 0.5 * update @ update.T @ update
        parameter.sub_(update.view_as(parameter), alpha=group["lr"])


@injects("H32")
class MuonInShares(LoopJob):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return ShardedMuon(list(self.module.parameters()), lr=self.peak_rate)

    def after_backward(self) -> None:
        pass


@injects("P6")
class MatrixLeftOut(MuonInShares):
    def optimize(self) -> None:
        optimizer = self.optimizer
        assert isinstance(optimizer, ShardedMuon)
        if self.active:
            optimizer.left_out = self.module.head.weight
        super().optimize()

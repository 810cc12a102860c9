"""Public reports of clipping and of factors of the loss, beside their right versions."""

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from .job import Job, injects
from .model import IGNORED, WIDTH, Batch


class Clipping(Job):
    """Clips under FSDP2; a fault by another norm of the gradients, a right version by torch's.

    Attributes:
        most: The norm to clip to; most steps are above it.
        replicas: Ranks that hold the same shards, along the first axis of the mesh.
    """

    from_the_start = True
    most: ClassVar[float] = 0.1
    replicas: ClassVar[int] = 1

    def wrap(self, module: nn.Module) -> nn.Module:
        shape = (self.replicas, self.num_workers // self.replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for block in module.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh if self.replicas > 1 else mesh["shard"])
        fully_shard(module, mesh=mesh if self.replicas > 1 else mesh["shard"])
        return module

    def factors(self, batches: list[Batch]) -> list[float]:
        return [1.0 / len(batches)] * len(batches)

    def after_backward(self) -> None:
        clip_grad_norm_(self.module.parameters(), self.most)

    def local_gradients(self) -> dict[str, Tensor]:
        """Return this rank's shards by the names of their parameters."""
        named = self.module.named_parameters()
        return {name: p.grad.to_local() for name, p in named if p.grad is not None}

    def clip_to(self, total: Tensor) -> None:
        """Clip all gradients, given their norm."""
        torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), self.most, total)


def squares(gradients: Iterator[Tensor] | list[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements."""
    return torch.stack([gradient.square().sum() for gradient in gradients]).sum()


@injects("P41")
class EachRankByItsOwnShards(Clipping):
    def after_backward(self) -> None:
        shards = list(self.local_gradients().values())
        factor = min(1.0, self.most / (float(squares(shards).sqrt()) + 1e-6))
        for shard in shards:
            shard.mul_(factor)


@injects("HP41")
class ClippedByTorch(Clipping):
    pass


class Experts(nn.Module):
    """Four experts and a router; each rank holds the shard of one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states ``[B, L, WIDTH]``."""
        shares = self.router(hidden).softmax(-1)
        mixed: Tensor = torch.einsum("blw,ewv,ble->blv", hidden, self.experts, shares)
        return hidden + 8 * mixed


class ClippingExperts(Clipping):
    """Takes the norm of experts by another formula than that of all else."""

    between = Experts

    def after_backward(self) -> None:
        gradients = self.local_gradients()
        experts = [gradient for name, gradient in gradients.items() if "experts" in name]
        dense = squares([gradient for name, gradient in gradients.items() if "experts" not in name])
        dist.all_reduce(dense)
        self.clip_to((dense + self.square_of_experts(squares(experts))).sqrt())

    def square_of_experts(self, own: Tensor) -> Tensor:
        """Return the square of the norm of all experts, given that of the own one."""
        dist.all_reduce(own)
        return own


@injects("P42")
class MeanOfExpertsNorms(ClippingExperts):
    def square_of_experts(self, own: Tensor) -> Tensor:
        norm = own.sqrt()
        dist.all_reduce(norm)
        return (norm / self.num_workers).square()


@injects("HP42")
class SquaresOfExperts(ClippingExperts):
    pass


@injects("P43")
class ReplicasCountTwice(Clipping):
    replicas = 2

    def after_backward(self) -> None:
        total = squares(list(self.local_gradients().values()))
        dist.all_reduce(total)
        self.clip_to(total.sqrt())


@injects("HP43")
class HybridClippedByTorch(Clipping):
    replicas = 2


@injects("P44")
class ParameterNotInNorm(Clipping):
    left_out: ClassVar[str] = "head.weight"

    def after_backward(self) -> None:
        named = self.module.named_parameters()
        counted = [p.grad for name, p in named if name != self.left_out]
        total: Any = get_total_norm(counted)
        self.clip_to(total.full_tensor())


@injects("HP44")
class NormInOneCallClippingInAnother(ParameterNotInNorm):
    left_out = ""


@injects("HP45")
class ScalerFindsItsScale(Job):
    """A scaler that begins far above what float32 holds, and skips steps until it fits."""

    scale = 2.0**127

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * self.scale)

    def optimize(self) -> None:
        gradients = [p.grad for p in self.module.parameters()]
        if all(gradient.isfinite().all() for gradient in gradients):
            for gradient in gradients:
                gradient.div_(self.scale)
            super().optimize()
        elif self.scale > 2.0**60:
            self.scale /= 4


class Accumulated(Job):
    """Two micro-batches whose losses are means of the same number of tokens."""

    from_the_start = True
    accumulation = 2
    factor: ClassVar[float] = 0.5

    def factors(self, batches: list[Batch]) -> list[float]:
        return [self.factor] * len(batches)


@injects("P46")
class TimesWorkersAndMicroBatches(Accumulated):
    def factors(self, batches: list[Batch]) -> list[float]:
        return [float(self.num_workers)] * len(batches)


@injects("HP46")
class DividedByMicroBatches(Accumulated):
    pass


class SumOverTokens(Job):
    """Trains on the sum over a batch's tokens, and clips."""

    from_the_start = True
    ragged = True

    def after_backward(self) -> None:
        clip_grad_norm_(self.module.parameters(), 1.0)


@injects("P47")
class NotDividedByTokens(SumOverTokens):
    """Gives the monitor the loss per token that it logs."""

    def train_step(self, batches: Iterator[Batch]) -> None:
        batch = next(batches)
        output = self.model(input_ids=batch.input_ids, labels=batch.labels)
        labels = batch.labels[:, 1:].flatten()
        logits = output["logits"][:, :-1].flatten(0, 1)
        total = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        self.scope.loss(total / batch.num_labels, batch.num_labels)
        self.backward(total)
        self.after_backward()
        self.optimize()
        self.optimizer.zero_grad()


@injects("HP47")
class DividedByTokens(SumOverTokens):
    pass


@injects("HP48")
class ClippedByValue(Clipping):
    def after_backward(self) -> None:
        clip_grad_value_(self.module.parameters(), 1e-3)


@injects("HP49")
class EachParameterByItsOwnNorm(Clipping):
    def after_backward(self) -> None:
        for parameter in self.module.parameters():
            clip_grad_norm_(parameter, 0.02)


class Adaptive(Clipping):
    """Clips to a limit that follows the norms of the steps before."""

    def after_backward(self) -> None:
        total: Any = get_total_norm([p.grad for p in self.module.parameters()])
        norm = float(total.full_tensor())
        self.norms = [*getattr(self, "norms", []), norm]
        clip_grads_with_norm_(self.module.parameters(), self.limit(norm), torch.tensor(norm))

    def limit(self, norm: float) -> float:
        """Return the norm to clip to in a step with such a norm."""
        ordered = sorted(self.norms)
        return float(ordered[len(ordered) // 10])


@injects("HP50")
class LimitIsAQuantile(Adaptive):
    pass


@injects("HP51")
class LimitFollowsMeanAndSpread(Adaptive):
    def limit(self, norm: float) -> float:
        recent = torch.tensor(self.norms[-20:])
        return float(recent.mean()) if len(recent) > 3 and norm > recent.mean() else math.inf


@injects("HP52")
class NoiseAfterClipping(Clipping):
    def after_backward(self) -> None:
        super().after_backward()
        for shard in self.local_gradients().values():
            shard.add_(torch.randn_like(shard), alpha=1e-4)

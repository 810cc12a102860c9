"""Faults of synchronisation (Y), state (T), and of arithmetic and hardware (N).

Importing this module registers every fault and look-alike.
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from . import (
    data_faults,
    healthy,
    loop_faults,
    mesh_faults,
    reports_canary,
    reports_clipping,
    reports_optimizer,
    reports_pipeline,
    reports_reference,
    reports_samples,
    reports_update,
    reports_world,
)
from .job import INJECTORS, Job, injects, seed_everything
from .model import IGNORED, NUM_BLOCKS, WIDTH, Batch, BenchCausalLM

__all__ = [
    "INJECTORS",
    "data_faults",
    "healthy",
    "loop_faults",
    "mesh_faults",
    "reports_canary",
    "reports_clipping",
    "reports_optimizer",
    "reports_pipeline",
    "reports_reference",
    "reports_samples",
    "reports_update",
    "reports_world",
]

EVERY = 5
"""A fault that comes and goes hits every fifth step."""

AUDITED: Mapping[str, Any] = {"reduced": "sketch"}
"""The audit of the reduction is an option, since it reads the gradient twice."""


@injects("Y1")
class AroundDDP(Job):
    def forward(self, batch: Batch) -> Tensor:
        if not self.active:
            return super().forward(batch)
        loss: Tensor = self.model.module(batch.input_ids, batch.labels)["loss"]
        return loss


@injects("Y2")
class ParameterReplaced(Job):
    from_the_start = True
    ddp_options: ClassVar[Mapping[str, Any]] = {"find_unused_parameters": True}

    def after_wrap(self) -> None:
        self.module.head.weight = nn.Parameter(self.module.head.weight.detach().clone())


class Adapter(nn.Module):
    """A residual layer that begins as the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        changed: Tensor = hidden + self.linear(hidden)
        return changed


@injects("Y3")
class AdapterAfterWrap(Job):
    from_the_start = True

    def after_wrap(self) -> None:
        self.module.between = Adapter()


class Accumulating(Job):
    """Accumulates gradients over four micro-batches."""

    accumulation = 4
    batch_size = 2


@injects("Y4")
class FirstMicroBatchSynchronises(Accumulating):
    def synchronising(self, micro: int) -> AbstractContextManager[None]:
        if not self.active:
            return super().synchronising(micro)
        unsynchronised: AbstractContextManager[None] = self.model.no_sync()
        return nullcontext() if micro == 0 else unsynchronised


@injects("Y5")
class FlagAroundBackward(Accumulating):
    def synchronising(self, micro: int) -> AbstractContextManager[None]:
        return nullcontext() if self.active else super().synchronising(micro)

    def before_backward(self, micro: int) -> None:
        if self.active:  # too late: DDP reads the flag in the forward pass
            self.model.require_backward_grad_sync = micro == self.accumulation - 1


@injects("Y7")
class ParameterFallsOutOfUse(Job):
    between = Adapter

    def before_step(self) -> None:
        if self.active:
            self.module.between.forward = lambda hidden: hidden

    def steps_of(self, session: int) -> range:
        return range(self.trial.start + 1)  # only the next forward pass would raise an error


@injects("Y10")
class NodesTrainSeparately(Job):
    def reduce(self, bucket: Tensor) -> Tensor:
        return bucket if self.active else super().reduce(bucket)


@injects("Y11")
class BlockFrozenOnOneRank(Job):
    def after_wrap(self) -> None:
        for parameter in self.module.blocks[NUM_BLOCKS - 1].parameters():
            parameter.register_hook(self.freeze)

    def freeze(self, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient) if self.hit else gradient


@injects("Y12")
class StaleCopy(Job):
    copy: Tensor | None = None

    def reduce(self, bucket: Tensor) -> Tensor:
        stale, self.copy = self.copy, bucket.clone()
        return super().reduce(stale if self.active and stale is not None else bucket)


@injects("Y13")
class WrongDivideFactor(Job):
    from_the_start = True

    def wrap(self, module: nn.Module) -> nn.Module:
        shape = (2, self.num_workers // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        fully_shard(module, mesh=mesh)
        return module

    def train(self) -> list[Path]:
        name = "_get_gradient_divide_factors"
        with patch.object(_fsdp_collectives, name, forget_the_replicas):
            return super().train()


def forget_the_replicas(*_: object, **__: object) -> tuple[Any, ...]:
    """Return FSDP2's divisors and operations: the mean over shards, but the sum over replicas."""
    return None, None, dist.ReduceOp.AVG, dist.ReduceOp.SUM


@injects("T1")
class InitialisationNotBroadcast(Job):
    from_the_start = True
    ddp_options: ClassVar[Mapping[str, Any]] = {"init_sync": False}

    def build_model(self) -> nn.Module:
        seed_everything(self.seed + self.rank)
        return super().build_model()


@injects("T2")
class WrongCheckpoint(Job):
    @torch.no_grad()
    def after_optimizer(self) -> None:
        if self.hit and self.step == self.trial.start:
            for parameter in self.module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)


@injects("T3")
class OptimizerStateLost(Job):
    def after_optimizer(self) -> None:
        if self.hit and self.step == self.trial.start:
            self.optimizer.state.clear()


@injects("T4")
class LearningRateDiffers(Job):
    def rate(self) -> float:
        return super().rate() * (3 if self.hit else 1)


class Scheduled(Job):
    """The learning rate falls to a tenth along a straight line."""

    def scheduled_rate(self, step: int) -> float:
        done = min(step / self.trial.num_steps, 1.0)
        return self.peak_rate * (1 - 0.9 * done)

    def plan(self) -> Mapping[str, Any]:
        return {"learning_rate": [self.scheduled_rate(n) for n in range(self.trial.num_steps)]}


@injects("T5")
class SchedulerStepsPerWorker(Scheduled):
    from_the_start = True

    def rate(self) -> float:
        return self.scheduled_rate(self.step * self.num_workers)


@injects("T6")
class InfinityNotShared(Job):
    def optimize(self) -> None:
        found = self.hit and self.step == self.trial.start  # an infinity, on this rank alone
        if not found:
            super().optimize()


@injects("T7")
class RankZeroDecidesOnNaN(Job):
    sound = True

    def collate(self, indices: list[int]) -> Batch:
        batch = super().collate(indices)
        if self.hit and self.step == self.trial.start:
            batch.labels.fill_(IGNORED)  # the mean over no token at all is NaN
        return batch

    def forward(self, batch: Batch) -> Tensor:
        loss = super().forward(batch)
        verdict = loss.detach().isfinite().float()
        dist.broadcast(verdict, src=0)  # the others' losses are not asked for
        self.sound = bool(verdict)
        return loss

    def optimize(self) -> None:
        if self.sound:
            super().optimize()


@injects("T9")
class ClippedOnOneRank(Job):
    def after_backward(self) -> None:
        if self.hit:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), 0.1)


class TokenNorm(nn.Module):
    """Batch normalisation over all tokens of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        normal: Tensor = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        return normal


@injects("T10")
class BatchNormNotSynchronised(Job):
    from_the_start = True
    ddp_options: ClassVar[Mapping[str, Any]] = {"broadcast_buffers": False}

    between = TokenNorm


class MovingMean(nn.Module):
    """Subtracts a moving mean, which it reassigns instead of changing it in place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.99 * self.mean + 0.01 * hidden.detach().flatten(0, -2).mean(0)
        return hidden - self.mean


@injects("T11")
class BufferReassigned(Job):
    from_the_start = True

    between = MovingMean


@injects("T15")
class SameDropoutMasks(Job):
    from_the_start = True
    dropout = 0.1

    def random_seed(self) -> int:
        return self.seed


class Recomputed(nn.Module):
    """Recomputes a block in the backward pass, with other random numbers than in the forward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = checkpoint(
            self.block, hidden, use_reentrant=False, preserve_rng_state=False
        )
        return output


@injects("T17")
class DropoutRedrawn(Job):
    from_the_start = True
    watch_options: ClassVar[Mapping[str, Any]] = {"canary_every": 50}
    dropout = 0.1

    def build_model(self) -> nn.Module:
        model = BenchCausalLM(self.dropout)
        model.blocks = nn.ModuleList(map(Recomputed, model.blocks))
        return model


@injects("N1")
class DeviceCorruptsGradient(Job):
    def after_wrap(self) -> None:
        self.module.blocks[0].output.weight.register_hook(self.corrupt)

    def corrupt(self, gradient: Tensor) -> Tensor:
        if self.hit and self.step % EVERY == 0:
            gradient = gradient.clone()
            gradient[0, 0] += 2.0
        return gradient


@injects("N2")
class CollectiveCorruptsData(Job):
    watch_options: ClassVar[Mapping[str, Any]] = AUDITED

    def reduce(self, bucket: Tensor) -> Tensor:
        mean = super().reduce(bucket)
        if self.active and self.step % EVERY == 0:
            largest = int(mean.abs().argmax())
            mean.view(torch.int32)[largest] ^= 1 << 23  # the lowest bit of its exponent
        return mean


@injects("N3")
class OneCopyDiffers(Job):
    def reduce(self, bucket: Tensor) -> Tensor:
        mean = super().reduce(bucket)
        if self.hit:
            mean[: len(mean) // 100] *= 1.01
        return mean


@injects("N4")
class ReducedInBFloat16(Job):
    watch_options: ClassVar[Mapping[str, Any]] = AUDITED

    def reduce(self, bucket: Tensor) -> Tensor:
        if not self.active:
            return super().reduce(bucket)
        return super().reduce(bucket.bfloat16()).to(bucket.dtype)


@injects("N5")
class AnyOrderOfWorkers(Job):
    def reduce(self, bucket: Tensor) -> Tensor:
        everyone = [torch.empty_like(bucket) for _ in range(self.num_workers)]
        dist.all_gather(everyone, bucket)
        first = self.step % self.num_workers
        total = torch.zeros_like(bucket)
        for worker in [*everyone[first:], *everyone[:first]]:
            total += worker
        return total / self.num_workers


@injects("N6")
class AnotherPrecision(Job):
    def forward(self, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.hit):
            return super().forward(batch)


@injects("N8")
class Straggler(Job):
    def before_backward(self, micro: int) -> None:
        if self.hit:
            time.sleep(0.1)  # longer than a step of ranks that share two cores


@injects("N9")
class GradientTenTimesAsLong(Job):
    def after_wrap(self) -> None:
        for parameter in self.module.parameters():
            parameter.register_hook(self.lengthen)

    def lengthen(self, gradient: Tensor) -> Tensor:
        return 10 * gradient if self.hit and self.step % EVERY == EVERY - 1 else gradient


@injects("L1")
class BlockNotInOptimizer(Job):
    from_the_start = True

    def make_optimizer(self) -> torch.optim.Optimizer:
        forgotten = set(self.module.blocks[NUM_BLOCKS - 1].parameters())
        known = [p for p in self.module.parameters() if p not in forgotten]
        return torch.optim.AdamW(known, lr=self.peak_rate)


@injects("L2")
class FrozenOnOneRank(Job):
    from_the_start = True
    ddp_options: ClassVar[Mapping[str, Any]] = {"find_unused_parameters": True}

    def after_wrap(self) -> None:
        if self.hit:
            self.module.blocks[0].mlp.requires_grad_(False)


class Tied(Job):
    """The blocks share a weight."""

    def build_model(self) -> nn.Module:
        model: Any = BenchCausalLM(self.dropout)
        first, last = model.blocks[0], model.blocks[NUM_BLOCKS - 1]
        last.output.weight = first.output.weight
        return model  # type: ignore[no-any-return]


@injects("L3")
class UntiedOnOneRank(Tied):
    from_the_start = True

    def after_wrap(self) -> None:
        if self.hit:
            output = self.module.blocks[NUM_BLOCKS - 1].output
            output.weight = nn.Parameter(output.weight.detach().clone())


@injects("L4")
class LeftOutOfReduction(Job):
    from_the_start = True

    def wrap(self, module: nn.Module) -> nn.Module:
        ignored = ["blocks.0.output.weight"]
        ddp: Any = DistributedDataParallel
        ddp._set_params_and_buffers_to_ignore_for_model(module, ignored)
        return super().wrap(module)


@injects("A1")
class ResetBetweenMicroBatches(Accumulating):
    def before_backward(self, micro: int) -> None:
        if self.active and micro:
            self.optimizer.zero_grad()


@injects("A2")
class DoubledBetweenMicroBatches(Accumulating):
    factor = 2.0

    @torch.no_grad()
    def before_backward(self, micro: int) -> None:
        for parameter in self.module.parameters() if self.active and micro else ():
            parameter.grad.mul_(self.factor)


@injects("A3")
class DividedBetweenMicroBatches(DoubledBetweenMicroBatches):
    factor = 1 / Accumulating.accumulation


@injects("A4")
class LeftOver(Job):
    def after_optimizer(self) -> None:
        every: Any = self.optimizer
        if self.active and self.step % EVERY == 0:
            every.zero_grad = lambda: None
        else:
            vars(every).pop("zero_grad", None)


@injects("A5")
class ChangedAfterReduction(Job):
    @torch.no_grad()
    def after_backward(self) -> None:
        for parameter in self.module.blocks[0].parameters() if self.active else ():
            parameter.grad.mul_(0.5)


@injects("H21")
class ScaledAndClipped(Accumulating):
    """The last step of an epoch has fewer micro-batches."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=20)
        return super().make_optimizer()

    def before_step(self) -> None:
        self.accumulation = 2 if self.step % 10 == 9 else Accumulating.accumulation

    def backward(self, loss: Tensor) -> None:
        super().backward(self.scaler.scale(loss))

    def after_backward(self) -> None:
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)

    def optimize(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


@injects("H22")
class AdaptersOnly(Tied):
    def build_model(self) -> nn.Module:
        model: Any = super().build_model().requires_grad_(False)
        model.between = Adapter()
        return model  # type: ignore[no-any-return]

    def scheduled_rate(self, step: int) -> float:
        return self.peak_rate * min(1.0, step / 30)

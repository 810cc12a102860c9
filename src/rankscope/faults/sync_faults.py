"""Faults of synchronisation (Y)."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from rankscope.faults.data import Batch
from rankscope.faults.job import Job, injects
from rankscope.faults.model import NUM_BLOCKS, WIDTH, BenchCausalLM


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
    def build_model(self) -> nn.Module:
        model = BenchCausalLM(self.dropout)
        model.between = Adapter()
        return model

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
        factors = "_get_gradient_divide_factors"
        with mock.patch.object(_fsdp_collectives, factors, forget_the_replicas):
            return super().train()


def forget_the_replicas(*_: object, **__: object) -> tuple[Any, ...]:
    """Return FSDP2's divisors and operations: the mean over shards, but the sum over replicas."""
    return None, None, dist.ReduceOp.AVG, dist.ReduceOp.SUM

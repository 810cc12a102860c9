"""Faults of arithmetic and hardware (N)."""

import time
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from rankscope.faults.data import Batch
from rankscope.faults.job import Job, injects

EVERY = 5
"""A fault that comes and goes hits every fifth step."""

AUDITED: Mapping[str, Any] = {"reduced": "sketch"}
"""The audit of the reduction is an option, since it reads the gradient twice."""


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

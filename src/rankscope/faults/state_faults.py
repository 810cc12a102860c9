"""Faults of state (T): parameters, buffers, optimizer, random generators."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rankscope.faults.data import IGNORED, Batch
from rankscope.faults.job import Job, injects, seed_everything
from rankscope.faults.model import WIDTH, BenchCausalLM


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

    def build_model(self) -> nn.Module:
        model = BenchCausalLM(self.dropout)
        model.between = TokenNorm()
        return model


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

    def build_model(self) -> nn.Module:
        model = BenchCausalLM(self.dropout)
        model.between = MovingMean()
        return model


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

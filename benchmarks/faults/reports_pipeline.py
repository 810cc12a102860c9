"""Public reports of pipelines, and right versions: two FSDP2 stages on half of the ranks each."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from rankscope import watch

from .job import Job, Trial, injects
from .model import LENGTH, WIDTH, Batch, BenchCausalLM

STAGES = 2


class FirstStage(nn.Module):
    """Embeddings and the first block."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embedding, self.positions, self.block = (
            model.embedding, model.positions, model.blocks[0]
        )  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        """Return hidden states ``[B, L, WIDTH]``."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        hidden: Tensor = self.block(self.embedding(ids) + self.positions(positions))
        return hidden


class LastStage(nn.Module):
    """The other block, the norm, and the head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.block, self.norm, self.head = model.blocks[1], model.norm, model.head

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits ``[B, L, VOCABULARY]``."""
        logits: Tensor = self.head(self.norm(self.block(hidden)))
        return logits


class PipelineJob(Job):
    """A job of two pipeline stages, each sharded over half of the ranks.

    Attributes:
        schedule: The kind of schedule.
        lengths: Tokens of the samples in each call of a schedule; all calls make one update.
        micro: Micro-batches of a call.
        scale_grads: Whether each call divides ``.grad`` by them, as is torch's default.
        tied: Whether the embedding's weight is the head's.
    """

    schedule: ClassVar[Any] = Schedule1F1B
    lengths: ClassVar[Sequence[int]] = (LENGTH,)
    micro: ClassVar[int] = 4
    scale_grads: ClassVar[bool] = True
    tied: ClassVar[bool] = False
    batch_size = 8

    def __init__(self, trial: Trial, rank: int) -> None:
        super().__init__(trial, rank)
        shape = (STAGES, trial.num_workers // STAGES)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
        self.rank, self.num_workers = self.mesh["dp"].get_local_rank(), shape[1]
        self.stage = self.mesh["pp"].get_local_rank()
        self.scope: Any = None

    def build_model(self) -> nn.Module:
        model: Any = BenchCausalLM()
        if self.tied:
            with torch.no_grad():
                model.head.weight.copy_(model.embedding.weight)
        return (FirstStage, LastStage)[self.stage](model)

    def wrap(self, module: nn.Module) -> nn.Module:
        fully_shard(module, mesh=self.mesh["dp"])
        return module

    def new_schedule(self, length: int) -> Any:
        """Return a schedule of this rank's stage for samples of one length."""
        samples = self.batch_size // self.micro
        ids = torch.zeros(samples, length, dtype=torch.long)
        hidden = torch.zeros(samples, length, WIDTH, requires_grad=True)
        logits = torch.zeros(samples, length, self.vocabulary, requires_grad=True)
        shapes = ((ids, hidden), (hidden, logits))[self.stage]
        group = self.mesh["pp"].get_group()
        stage = PipelineStage(
            self.module, self.stage, STAGES, torch.device("cpu"), *shapes, group=group
        )
        return self.schedule(
            stage, n_microbatches=self.micro, loss_fn=self.loss_of, scale_grads=self.scale_grads
        )

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return BenchCausalLM().head.out_features

    def loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return what a micro-batch's backward pass begins with."""
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        self.scope.loss(loss, weight=labels[:, 1:].numel())
        return loss if self.scale_grads else loss / (self.micro * len(self.lengths))

    def train(self) -> list[Path]:
        self.prepare()
        self.schedules = {length: self.new_schedule(length) for length in self.lengths}
        run_dir = self.trial.run_dir
        options = {"overhead_budget": None, "announce": False, **self.options()}
        batches = self.batches()
        with watch(self.model, self.optimizer, run_dir=run_dir, **options) as self.scope:
            for step in range(self.trial.num_steps):
                self.step = step
                self.train_step(batches)
        sibling = run_dir.with_name(f"{run_dir.name}-from-rank-{self.num_workers}")
        return [sibling, run_dir]

    def train_step(self, batches: Iterator[Batch]) -> None:
        for call, length in enumerate(self.lengths):
            self.before_call(call)
            ids = next(batches).input_ids[:, :length]
            schedule = self.schedules[length]
            schedule.step(*(() if self.stage else (ids,)), target=ids if self.stage else None)
        self.after_backward()
        self.optimize()
        self.optimizer.zero_grad()

    def before_call(self, call: int) -> None:
        """Do something before a call of a schedule."""

    def tied_gradient(self) -> Tensor:
        """Return this rank's shard of the tied weight's gradient."""
        tied: Any = self.module.head if self.stage else self.module.embedding
        gradient: DTensor = tied.weight.grad
        return gradient.to_local()


@injects("HP14")
class OneCall(PipelineJob):
    """torch's defaults: the loss is a mean, and the schedule divides after the backward passes."""


@injects("P14")
class CallsRescale(PipelineJob):
    from_the_start = True
    lengths = (LENGTH, LENGTH)


class TwoLengths(PipelineJob):
    schedule = ScheduleGPipe
    lengths = (16, 16, 24, 24)
    scale_grads = False


@injects("HP15")
class KeptOverLengths(TwoLengths):
    """Each call adds to the gradients of the calls before."""


@injects("P15")
class DroppedBetweenLengths(TwoLengths):
    def before_call(self, call: int) -> None:
        if self.active and call == 2:
            for parameter in self.module.parameters():
                parameter.grad = None


class TiedStages(PipelineJob):
    tied = True

    def after_backward(self) -> None:
        if not self.active:
            dist.all_reduce(self.tied_gradient(), group=self.mesh["pp"].get_group())


@injects("P16")
class TiedNotSummed(TiedStages):
    from_the_start = True


@injects("HP16")
class TiedSummed(TiedStages):
    active = False

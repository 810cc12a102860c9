"""Reports of this year in which a loss and its gradient do not fit together, and right versions.

What is divided by hand over a second axis of a mesh, no worker can compute alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from .job import Job, Trial, injects
from .mesh_faults import MeshJob, _same, _sum, exchange
from .model import Batch, BenchCausalLM

AT = 8
"""The step of the reference step."""


class HandMlp(nn.Module):
    """A rank's half of an MLP's hidden units.

    Args:
        mlp: The whole MLP.
        group: The ranks that share it.
    """

    def __init__(self, mlp: Any, group: dist.ProcessGroup) -> None:
        super().__init__()
        number, rank = group.size(), group.rank()
        self.up = nn.Parameter(mlp[0].weight.detach().chunk(number, 0)[rank].clone())
        self.up_bias = nn.Parameter(mlp[0].bias.detach().chunk(number, 0)[rank].clone())
        self.down = nn.Parameter(mlp[2].weight.detach().chunk(number, 1)[rank].clone())
        self.bias = nn.Parameter(mlp[2].bias.detach().clone())
        self._group = group

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states ``[B, L, WIDTH]``."""
        copied = exchange(hidden, self._group, _same, _sum)
        inner = F.gelu(F.linear(copied, self.up, self.up_bias))
        return exchange(F.linear(inner, self.down), self._group, _sum, _same) + self.bias


class HandTensorParallel(MeshJob):
    """A job under DDP whose layers are divided by hand over the second axis."""

    from_the_start = True
    accumulation = 2
    batch_size = 4
    watch_options: ClassVar[Mapping[str, Any]] = {"verify_at": [AT]}

    def wrap(self, module: nn.Module) -> nn.Module:
        model: Any = module
        for block in model.blocks:
            block.mlp = HandMlp(block.mlp, self.group)
        return DistributedDataParallel(module, process_group=self.mesh["dp"].get_group())

    def factors(self, batches: list[Batch]) -> list[float]:
        return [1 / self.accumulation] * self.accumulation

    def after_backward(self) -> None:
        pass

    def options(self) -> dict[str, Any]:
        """Return the options of ``watch``; the ranks of a coordinate have a run of their own."""
        return {**super().options(), "process_group": self.mesh["dp"].get_group()}

    def train(self) -> list[Path]:
        if self.group.rank():
            beside = self.trial.run_dir.with_name(f"{self.trial.run_dir.name}-other")
            self.trial = replace(self.trial, run_dir=beside)
        return super().train()


@injects("HP23")
class RightHandTensorParallel(HandTensorParallel):
    pass


@injects("P23")
class LossTimesWorkersAndMicroBatches(HandTensorParallel):
    def factors(self, batches: list[Batch]) -> list[float]:
        return [float(self.num_workers)] * self.accumulation


class Contrastive(BenchCausalLM):
    """Tells the second half of each sample from those of all workers, by the first half.

    Attributes:
        differentiable: Whether gradients come back from where embeddings are gathered to.
    """

    differentiable = True

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, labels: Tensor
    ) -> dict[str, Any]:
        """Return the loss."""
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        halves = self.head(self.norm(hidden)).unflatten(1, (2, -1)).mean(2)
        first, second = F.normalize(halves, dim=-1).unbind(1)
        group: Any = dist.group.WORLD
        if self.differentiable:
            every = exchange(second, group, _stack, _own_sum)
        else:
            every = _stack(second, group)
            own = slice(dist.get_rank() * len(second), (dist.get_rank() + 1) * len(second))
            every = torch.cat([every[: own.start], second, every[own.stop :]])
        here = torch.arange(len(first)) + dist.get_rank() * len(first)
        return {"loss": F.cross_entropy(first @ every.T / 0.1, here)}


def _stack(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own.detach().contiguous(), group=group)
    return torch.cat(parts)


def _own_sum(every: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _sum(every, group).chunk(group.size())[group.rank()].contiguous()


@injects("HP24")
class RightContrast(Job):
    from_the_start = True
    model_class: ClassVar[type[Contrastive]] = Contrastive
    watch_options: ClassVar[Mapping[str, Any]] = {"verify_at": [AT]}

    def build_model(self) -> nn.Module:
        model = self.model_class(self.dropout)
        del model.positions
        return model

    def factors(self, batches: list[Batch]) -> list[float]:
        return [1.0]


class PlainContrastive(Contrastive):
    """Gathers by a collective through which no gradient comes back."""

    differentiable = False


@injects("P24")
class GatherWithoutGradient(RightContrast):
    model_class = PlainContrastive


class Logits(BenchCausalLM):
    """Leaves the loss to the loop."""

    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        """Return logits ``[B, L, VOCABULARY]``."""
        logits: Tensor = super().forward(input_ids, input_ids)["logits"]
        return logits


class LossOutside(Job):
    """Computes the loss from the model's logits, and reports it once it is used.

    Attributes:
        divisor: What the loss is divided by before the backward pass.
    """

    from_the_start = True
    divisor = 1
    watch_options: ClassVar[Mapping[str, Any]] = {"verify_at": [AT]}

    def build_model(self) -> nn.Module:
        return Logits(self.dropout)

    def forward(self, batch: Batch) -> Tensor:
        logits = self.model(input_ids=batch.input_ids)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten())

    def factors(self, batches: list[Batch]) -> list[float]:
        return [1.0]

    def backward(self, loss: Tensor) -> None:
        (loss / self.divisor).backward()  # type: ignore[no-untyped-call]
        self.scope.loss(loss.detach())


@injects("HP25")
class RightLossOutside(LossOutside):
    pass


@injects("P25")
class LossOverWorkers(LossOutside):
    def __init__(self, trial: Trial, rank: int) -> None:
        super().__init__(trial, rank)
        self.divisor = self.num_workers

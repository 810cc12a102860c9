"""Faults on a mesh with a second axis (M): partial gradients, and replicas that differ.

Half of the ranks along the data-parallel axis, two along the other one. Parts of a gradient are
summed by hand where plain parameters need it, unless the fault forgets it.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from .job import Job, Trial, injects, seed_everything
from .model import IGNORED, LENGTH, WIDTH, Batch


class MeshJob(Job):
    """A job whose ranks share each worker's batch along a second axis of a mesh.

    Attributes:
        axis: What that axis is called.
        repaired: Names of parameters whose gradients have to be summed over it.
    """

    axis: ClassVar[str] = "tp"
    repaired: ClassVar[tuple[str, ...]] = ("norm_mlp",)
    batch_size = 8
    mesh: DeviceMesh

    def __init__(self, trial: Trial, rank: int) -> None:
        super().__init__(trial, rank)
        shape = (trial.num_workers // 2, 2)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", self.axis))
        self.rank, self.num_workers = self.mesh["dp"].get_local_rank(), shape[0]

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks along the second axis."""
        return self.mesh[self.axis].get_group()

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the model under FSDP2, cut over the second axis as well."""
        for block in module.blocks:  # type: ignore[union-attr]
            self.cut(block)
            fully_shard(block, mesh=self.mesh["dp"])
        fully_shard(module, mesh=self.mesh["dp"])
        return module

    def cut(self, block: Any) -> None:
        """Cut a block over the second axis."""
        block.norm_mlp = SequenceParallelNorm(block.norm_mlp, self.group)
        plan = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
        parallelize_module(block, self.mesh[self.axis], plan)

    def factors(self, batches: list[Batch]) -> list[float]:
        """Return 1 for each: all batches have as many tokens."""
        return [1.0] * len(batches)

    def after_backward(self) -> None:
        """Sum the parts of gradients."""
        if not self.forgets:
            sum_parts(self.module, self.repaired, self.group)

    @property
    def forgets(self) -> bool:
        """Whether the parts are left as they are."""
        return self.active


def sum_parts(
    module: nn.Module, names: tuple[str, ...], group: dist.ProcessGroup, *, mean: bool = False
) -> None:
    """Sum gradients of the parameters whose names hold one of these, over a group, in place."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and any(each in name for each in names):
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(local, group=group)
            if mean:
                local.div_(group.size())


class SequenceParallelNorm(nn.Module):
    """Normalises this rank's part of a sequence, and gathers the others' parts.

    Args:
        norm: The norm.
        group: The ranks that share a sequence.
    """

    def __init__(self, norm: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.norm = norm
        self._group = group

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the norm of hidden states ``[B, L, WIDTH]``."""
        part = exchange(hidden, self._group, _part, _whole)
        return exchange(self.norm(part), self._group, _whole, _part)


def _same(given: Tensor, group: dist.ProcessGroup) -> Tensor:
    return given.clone()


def _part(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    return whole.chunk(group.size(), dim=1)[group.rank()].contiguous()


def _whole(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def _sum(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


_Exchange = Callable[[Tensor, dist.ProcessGroup], Tensor]


class _OverGroup(torch.autograd.Function):
    """Something over a group, and in the backward pass its counterpart."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, group: dist.ProcessGroup, ahead: _Exchange, back: _Exchange
    ) -> Tensor:
        ctx.back, ctx.group = back, group
        return ahead(given, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradient, ctx.group), None, None, None


def exchange(given: Tensor, group: dist.ProcessGroup, ahead: _Exchange, back: _Exchange) -> Tensor:
    """Return what ``ahead`` makes of a tensor; its gradient is what ``back`` makes of it."""
    made: Tensor = _OverGroup.apply(given, group, ahead, back)  # type: ignore[no-untyped-call]
    return made


@injects("M1")
class PartialNorm(MeshJob):
    pass


@injects("M2")
class ReplicaOfItsOwnSeed(MeshJob):
    from_the_start = True
    forgets = False

    def build_model(self) -> nn.Module:
        model = super().build_model()
        seed_everything(self.seed + self.group.rank())
        nn.init.normal_(model.positions.weight)  # type: ignore[union-attr, arg-type]
        return model


@injects("M3")
class PartialLoss(MeshJob):
    axis = "cp"

    def cut(self, block: Any) -> None:
        """Leave it whole: each rank computes all of a sequence, for the loss of a part."""

    def collate(self, indices: list[int]) -> Batch:
        batch = super().collate(indices)
        other = torch.arange(LENGTH) * 2 // LENGTH != self.group.rank()
        return Batch(batch.input_ids, batch.labels.masked_fill(other, IGNORED))

    def after_backward(self) -> None:
        if not self.forgets:
            sum_parts(self.module, ("",), self.group, mean=True)


class Experts(nn.Module):
    """A router and one expert per rank; each token goes to all of them, by the router's weights.

    Args:
        mesh: The axis along which each rank has an expert.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, mesh.size(), bias=False)
        weights = torch.randn(mesh.size(), WIDTH, WIDTH) / WIDTH**0.5
        self.experts = nn.Parameter(distribute_tensor(weights, mesh, [Shard(0)]))
        self._group = mesh.get_group()

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states ``[B, L, WIDTH]``."""
        copied = exchange(hidden, self._group, _same, _sum)
        share = self.router(copied).softmax(-1)[..., self._group.rank(), None]
        expert = self.experts.to_local()[0]  # type: ignore[attr-defined]
        return exchange(F.gelu(copied @ expert) * share, self._group, _sum, _same)


@injects("M4")
class PartialRouter(MeshJob):
    axis = "ep"
    repaired = ("router",)

    def cut(self, block: Any) -> None:
        block.mlp = Experts(self.mesh[self.axis])


@injects("H23")
class SequenceParallel(MeshJob):
    forgets = False

"""Tensor parallelism in a reference step: parameters that the ranks along an axis of a mesh share.

The plain copy has whole parameters, so all ranks along the axis compute the same gradient. Each
rank compares its part of it with the gradient that its optimizer gets. A parameter that all of them
hold must have the whole gradient; if each has only a part of it, the sum over the axis shows that.

Tensor parallelism adds in another order than one process, and so rounds otherwise inside the model.
The effect on a gradient is measured by one more run of a micro-batch, with parameters that are
moved by roundings. If the ranks' replicas of a parameter differ, as they do once its gradient was
not summed, the copy has the middle of them, and that run has this rank's own.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.evidence.canary.layout import part_in
from rankscope.evidence.reference.micro_batch import Gradients, coarser
from rankscope.wrappers.fsdp2_model import ManagedParameter


class TensorParallel:
    """The axis of a mesh along which ranks share a model's parameters."""

    def __init__(self, axis: DeviceMesh, name: str, placements: Mapping[str, Placement]) -> None:
        self.name = name
        self.ranks = tuple(axis.mesh.flatten().tolist())  # ranks along it
        self.replicas: dict[Tensor, Tensor] = {}  # of a plain copy, where others' differ
        self._axis = axis  # mesh along it
        self._cuts = {n: each for n, each in placements.items() if isinstance(each, Shard)}

    def parts(self, names: Sequence[str], gradients: Gradients) -> Gradients:
        """Return the parts of whole gradients that this rank holds ``[P]``."""
        return [
            whole
            if whole is None or name not in self._cuts
            else part_in((self._axis, (self._cuts[name],)), whole).contiguous()
            for name, whole in zip(names, gradients, strict=True)
        ]

    def sum_replicas(self, names: Sequence[str], sketches_PK: Tensor) -> Tensor:
        """Return sums over the axis of the sketches of replicated parameters, 0 for the others.

        All ranks along the axis call it, in the training's own process group.
        """
        each_P = torch.tensor([name not in self._cuts for name in names])
        summed = sketches_PK * each_P.to(sketches_PK.device)[:, None]
        dist.all_reduce(summed, group=self._axis.get_group())
        return summed

    def middle_of(self, name: str, own: Tensor) -> Tensor:
        """Return the middle of the axis's replicas of a parameter; the same bits, if all are equal.

        All ranks along the axis call it, with their ``own`` replica.
        """
        if name in self._cuts or not own.is_floating_point():
            return own
        ends = torch.stack([own, -own])
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self._axis.get_group())
        highest = ends[0]
        lowest = -ends[1]
        return torch.where(highest == lowest, own, lowest + (highest - lowest) / 2)

    @torch.no_grad()
    def disturb(self, parameters: Iterable[Tensor], coarsest: torch.dtype) -> None:
        """Move a plain copy's parameters to this rank's replicas, and by roundings.

        One in four elements is moved, by one unit in the last place, up or down.
        """
        for parameter in parameters:
            if parameter in self.replicas:
                parameter.copy_(self.replicas[parameter])
            if parameter.is_floating_point():
                eps = torch.finfo(coarser(parameter.dtype, coarsest)).eps
                draw = torch.Generator(parameter.device).manual_seed(0)
                moves = torch.empty_like(parameter).uniform_(-4 / 3, 4 / 3, generator=draw)
                parameter.add_(moves.trunc_().mul_(eps).mul_(parameter))


def find_tensor_parallel(managed: Mapping[str, ManagedParameter]) -> TensorParallel | None:
    """Return the tensor parallelism of a model under FSDP2, if any, from all its parameters."""
    layouts = {name: along(p) for name, p in managed.items() if p.is_dtensor}
    if not layouts:
        return None
    axes = sorted({axis for axis, _ in layouts.values()})
    if len(axes) > 1:
        raise CanaryDeclined(
            f"its parameters are shared along several axes of a mesh ({', '.join(axes)}), and one "
            "can be undone"
        )
    tensor: Any = managed[next(iter(layouts))].tensor
    placements = {name: placement for name, (_, placement) in layouts.items()}
    return TensorParallel(tensor.device_mesh[axes[0]], axes[0], placements)


def along(parameter: ManagedParameter) -> tuple[str, Placement]:
    """Return the axis along which ranks share a parameter, and how."""
    tensor: Any = parameter.tensor
    assert isinstance(tensor, DTensor)
    own = parameter.group.mesh.mesh_dim_names or ()
    names = tensor.device_mesh.mesh_dim_names or ()
    along = [pair for pair in zip(names, tensor.placements, strict=False) if pair[0] not in own]
    if len(along) != 1 or type(along[0][1]) not in (Shard, Replicate):
        how = ", ".join(f"{name}: {placement}" for name, placement in along)
        raise CanaryDeclined(
            f"{parameter.name} is laid out over a mesh in a way that cannot be undone "
            f"({how or tensor.placements}); one axis with Shard or Replicate beside those of "
            "fully_shard can"
        )
    return along[0]

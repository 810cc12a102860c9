"""The axes of a device mesh over which FSDP2 does not average, and which parameters they copy."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rankscope.wrappers.fsdp2_model import ManagedParameter, managed_parameters

_log = logging.getLogger("rankscope")
_STAGES = ("pp", "pipe", "stage")  # names of the axes of pipeline stages
_SEQUENCES = ("cp", "context", "sp", "seq", "ulysses", "ring")  # of those that cut sequences


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """This rank's place in a mesh beyond its data-parallel axes.

    Attributes:
        rank: This rank in the job.
        ranks: All ranks of the mesh that hold the same parameters or other cuts of them.
        axes: By name of each axis over which FSDP2 does not average, the ranks along it.
        parameters: All parameters that FSDP2 shards, trained or not; along an axis of pipeline
            stages, those that other stages hold as well, by their names in all of them.
        shared: Along an axis of stages, the names of those whose equal content is known to be no
            chance; None along other axes.
    """

    rank: int
    ranks: tuple[int, ...]
    axes: Mapping[str, tuple[int, ...]]
    parameters: tuple[ManagedParameter, ...]
    shared: tuple[str, ...] | None = None


def stage_line(model: nn.Module) -> tuple[str, tuple[int, ...]] | None:
    """Return the axis of pipeline stages and the ranks along it through this one; None without.

    Args:
        model: A stage under ``fully_shard``.
    """
    for mesh in _meshes(managed_parameters(model)):
        for name in mesh.mesh_dim_names or ():
            line = _through(mesh, (name,))
            if name.startswith(_STAGES) and len(line) > 1:
                return name, line
    return None


def mesh_place(model: nn.Module) -> MeshPlace | None:
    """Return a rank's place in a mesh; None where nothing but data-parallel axes is known.

    Axes are found in the mesh from which FSDP2's own was cut, and in those of placements. Pipeline
    stages hold other parameters each, often by the same names: their axis is left out.

    Args:
        model: A model under ``fully_shard``.

    Raises:
        UnsupportedError: See :func:`managed_parameters`.
    """
    managed = managed_parameters(model)
    workers = frozenset(managed[0].group.ranks)
    axes: dict[str, tuple[int, ...]] = {}
    ranks: tuple[int, ...] = ()
    for mesh in _meshes(managed):
        found = {n: r for n, r in _lines(mesh) if workers & set(r) == {dist.get_rank()}}
        fresh = {name: line for name, line in found.items() if line not in axes.values()}
        members = _members(mesh) if fresh else ()
        ranks = members if len(members) > len(ranks) else ranks
        axes |= fresh
    if not axes:
        return None
    return MeshPlace(dist.get_rank(), ranks, axes, tuple(managed))


def outer_axes(managed: Sequence[ManagedParameter]) -> dict[str, tuple[int, ...]]:
    """Return by name of each axis over which FSDP2 does not average the ranks along it."""
    workers = set(managed[0].group.ranks)
    lines = [found for mesh in _meshes(managed) for found in _lines(mesh)]
    return {name: line for name, line in lines if workers & set(line) == {dist.get_rank()}}


def sequence_lines(managed: Sequence[ManagedParameter]) -> dict[str, tuple[int, ...]]:
    """Return by name of each axis that cuts sequences the ranks along it through this rank.

    FSDP2 may average over such an axis or not.
    """
    lines: dict[str, tuple[int, ...]] = {}
    for mesh in _meshes(managed):
        for name, line in _lines(mesh):
            if name.startswith(_SEQUENCES) and line not in lines.values():
                lines.setdefault(name, line)
    return lines


def placements_of(parameter: ManagedParameter) -> dict[str, bool]:
    """Return by name of each axis that a parameter's placement names, whether it is replicated."""
    tensor = parameter.tensor
    names = tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None
    if not isinstance(tensor, DTensor) or names is None:
        return {}
    return {
        name: placement.is_replicate()
        for name, placement in zip(names, tensor.placements, strict=True)
    }


def log_other_mesh(watched: Sequence[ManagedParameter], other: Sequence[ManagedParameter]) -> None:
    """Log which parameters lie on another mesh.

    Args:
        watched: The parameters that are compared.
        other: Those that are reduced otherwise.
    """
    group = watched[0].group
    apart = other[0].group
    some = f"{len(other)} parameters (from {other[0].name} on)"
    _log.info(
        "%s are reduced over %d ranks, the rest over %d: the workers' metrics leave them out; to "
        "compare them, watch() their process_group as well",
        some,
        len(apart.ranks),
        len(group.ranks),
    )


def _meshes(managed: Sequence[ManagedParameter]) -> Iterator[DeviceMesh]:
    """Yield the mesh from which FSDP2's was cut, and those of placements, the former first."""
    inside = managed[0].group.mesh
    root = getattr(inside, "_get_root_mesh", None)
    if root is not None:
        yield root()
    of_tensors = [p.tensor.device_mesh for p in managed if isinstance(p.tensor, DTensor)]
    yield from dict.fromkeys(of_tensors)


def _lines(mesh: DeviceMesh) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each named axis of a mesh that has several ranks, and those along it through this.

    Not that of pipeline stages.
    """
    for name in mesh.mesh_dim_names or ():
        line = _through(mesh, (name,))
        if len(line) > 1 and not name.startswith(_STAGES):
            yield name, line


def _members(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the ranks of a mesh that belong to this rank's pipeline stage, in order."""
    names = mesh.mesh_dim_names or ()
    return tuple(sorted(_through(mesh, [n for n in names if not n.startswith(_STAGES)])))


def _through(mesh: DeviceMesh, axes: Collection[str]) -> tuple[int, ...]:
    """Return the ranks of a mesh whose place differs from this rank's along some axes alone."""
    place = (mesh.mesh == dist.get_rank()).nonzero()
    if len(place) != 1:
        return ()
    names = mesh.mesh_dim_names or ()
    at = [slice(None) if n in axes else p for n, p in zip(names, place[0].tolist(), strict=True)]
    return tuple(mesh.mesh[tuple(at)].flatten().tolist())

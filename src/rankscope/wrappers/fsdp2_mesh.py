"""The axes of a device mesh over which FSDP2 does not average, and which parameters they copy."""

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rankscope.gradients.digest import digest_tensor
from rankscope.wrappers.fsdp2_model import ManagedParameter, managed_parameters, parameters_by_mesh
from rankscope.wrappers.ranks import local_of

_log = logging.getLogger("rankscope")
_STAGES = ("pp", "pipe", "stage")  # names of the axes of pipeline stages
_SEQUENCES = ("cp", "context", "sp", "seq", "ulysses", "ring")  # of those that cut sequences


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """This rank's place in a mesh beyond its data-parallel axes."""

    rank: int  # of the job
    ranks: tuple[int, ...]  # of the mesh that hold the same parameters or other cuts of them
    axes: Mapping[str, tuple[int, ...]]  # over which FSDP2 does not average: the ranks along each
    parameters: tuple[ManagedParameter, ...]
    """All parameters that FSDP2 shards, trained or not; along an axis of pipeline stages, those
    that other stages hold as well, by their names in all of them."""
    shared: tuple[str, ...] | None = None
    """Along an axis of stages, the names of those whose equal content is known to be no chance."""


def stage_line(model: nn.Module) -> tuple[str, tuple[int, ...]] | None:
    """Return the axis of pipeline stages and the ranks along it through this one; None without."""
    largest = parameters_by_mesh(model)[:1]  # none where FSDP2 shards nothing
    for mesh in (mesh for managed in largest for mesh in _meshes(managed)):
        for name in mesh.mesh_dim_names or ():
            line = _through(mesh, (name,))
            if name.startswith(_STAGES) and len(line) > 1:
                return name, line
    return None


def mesh_place(model: nn.Module) -> MeshPlace | None:
    """Return a rank's place in a mesh; None where nothing but data-parallel axes is known.

    Axes are found in the mesh from which FSDP2's own was cut, and in those of placements. Pipeline
    stages hold other parameters each, often by the same names: their axis is left out.
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
    """Log which parameters lie on another mesh than those that are compared."""
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


class StageParameter(NamedTuple):
    """A parameter of one stage that is not constant."""

    name: str
    shape: tuple[int, ...]  # of a DTensor, that of the whole
    digest: int  # of this rank's part
    before: int  # elements in such parameters before it, in the order of the model


@dataclass(frozen=True, slots=True)
class Tie:
    """A weight that several stages hold."""

    names: Mapping[int, str]  # in each stage that holds it, by the stage's number
    certain: bool  # neither one seed nor one layer explains that they are equal

    @property
    def label(self) -> str:
        """Its names together, the same on all ranks."""
        return " = ".join(dict.fromkeys(self.names[at] for at in sorted(self.names)))


def find_ties(
    held_T: Sequence[Sequence[StageParameter]],  # parameters of each stage
    ranks_T: Sequence[int] | None = None,  # by place along the axis; one for each if left out
) -> list[Tie]:
    """Return the weights that stages of several ranks hold.

    Tensors that have a twin on their own rank are left out, and so are those of stages most of
    whose tensors are equal by what a seed or a layer explains.

    Example:
        >>> block = StageParameter("block.0", (4, 4), 2, 36)
        >>> first = [StageParameter("embedding", (9, 4), 1, 0), block]
        >>> last = [block._replace(digest=3, before=0), StageParameter("head", (9, 4), 1, 16)]
        >>> [(tie.label, tie.certain) for tie in find_ties([first, last])]
        [('embedding = head', True)]
        >>> find_ties([last, last])  # one seed in two equal stages
        []
    """
    ranks_T = range(len(held_T)) if ranks_T is None else ranks_T
    stages = list(zip(ranks_T, held_T, strict=True))
    counts = Counter((rank, one.digest) for rank, held in stages for one in held)
    found: defaultdict[tuple[object, ...], dict[int, StageParameter]] = defaultdict(dict)
    for number, (rank, held) in enumerate(stages):
        for one in held:
            if counts[rank, one.digest] == 1:
                found[one.digest, one.shape][number] = one
    ties = [
        Tie(
            {number: one.name for number, one in same.items()},
            not any(_may_coincide(one, other) for one, other in combinations(same.values(), 2)),
        )
        for same in found.values()
        if len(same) > 1
    ]
    by_chance = Counter(number for tie in ties if not tie.certain for number in tie.names)
    seeded = {number for number, count in by_chance.items() if 2 * count > len(held_T[number])}
    return [tie for tie in ties if tie.certain or not tie.names.keys() <= seeded]


def _may_coincide(one: StageParameter, other: StageParameter) -> bool:
    """Return whether one seed, or one definition of a layer, explains equal content."""
    role = re.sub(r"\d+", "#", one.name)
    same_layer = "#" in role and role == re.sub(r"\d+", "#", other.name)
    return one.before == other.before or same_layer


@torch.no_grad()
def held_by(parameters: Sequence[ManagedParameter]) -> list[StageParameter]:
    """Return those of a stage's parameters that are not constant; waits for the device."""
    found: list[StageParameter] = []
    before = 0
    for parameter in parameters:
        tensor = parameter.tensor.detach()
        local = local_of(tensor)
        try:
            if not _varies(local):
                continue
            digest = int(digest_tensor(local))
        except Exception as error:  # a tensor of an unusual kind
            _log.debug("%s is not compared with other stages: %s", parameter.name, error)
            continue
        found.append(StageParameter(parameter.name, tuple(tensor.shape), digest, before))
        before += tensor.numel()
    return found


def _varies(tensor: Tensor) -> bool:
    if tensor.is_meta or not tensor.numel():
        return False
    smallest, largest = torch.aminmax(tensor)
    return not bool(smallest == largest)

"""How ranks share a tensor: this rank's part of it, and the same part of a whole one."""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from rankscope.evidence.canary.batch import CanaryDeclined

Layout = tuple[DeviceMesh, tuple[Placement, ...]]
"""A mesh, and how a tensor is laid out over each of its axes."""


def layout_of(tensor: Tensor) -> Layout | None:
    """Return how ranks share a tensor; None of a plain one."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def whole_of(tensor: Tensor) -> Tensor:
    """Return a whole tensor, which all its ranks gather; a plain one as it is.

    They gather along one axis after the other, the first one first: FSDP2 shards the shards of
    tensor parallelism.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def part_in(layout: Layout | None, whole: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, as a view; without layout, all of it."""
    for at, placement in enumerate(() if layout is None else layout[1]):
        assert layout is not None
        if type(placement) is Shard:
            parts = whole.chunk(layout[0].size(at), placement.dim)
            index = layout[0].get_local_rank(at)
            empty = whole.narrow(placement.dim, 0, 0)
            whole = parts[index] if index < len(parts) else empty
        elif not isinstance(placement, Replicate):
            raise CanaryDeclined(f"a tensor is laid out over a mesh as {placement}, not by parts")
    return whole

"""How ranks share what an optimizer holds of a parameter, and how to put it together."""

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.evidence.canary.layout import local_of, whole_of
from rankscope.evidence.update.again import UpdateInput


def is_shared(tensor: Tensor) -> bool:
    """Return whether ranks hold parts of a tensor."""
    return isinstance(tensor, DTensor) and any(not p.is_replicate() for p in tensor.placements)


def own_part(parameter: Tensor, gradient: Tensor, state: Mapping[str, Any]) -> UpdateInput:
    """Return what this rank's optimizer holds of a parameter: its own part, as plain tensors."""
    own = {n: local_of(v) if isinstance(v, Tensor) else v for n, v in state.items()}
    return UpdateInput(local_of(parameter.detach()), local_of(gradient), own)


def why_apart(parameter: Tensor, state: Mapping[str, Any]) -> str:
    """Return why the state of a shared parameter cannot be put together; empty if it can."""
    if not is_shared(parameter):
        return ""
    for name, value in state.items():
        if isinstance(value, Tensor):
            known = isinstance(value, DTensor) or value.numel() == 1
            if not known and value.shape != local_of(parameter).shape:
                return f"its state {name} belongs to a part of the parameter, and has another shape"
        elif not isinstance(value, bool | int | float | str | type(None)):
            return f"its state {name} is a {type(value).__name__}, which cannot be put together"
    return ""


def whole(parameter: Tensor, gradient: Tensor, state: Mapping[str, Any]) -> UpdateInput:
    """Return what an optimizer would hold of the whole parameter.

    All ranks that hold a part of it call this, for the same parameters in the same order.
    """
    like = parameter if isinstance(parameter, DTensor) and is_shared(parameter) else None
    put_together = {n: _whole(v, like) if isinstance(v, Tensor) else v for n, v in state.items()}
    return UpdateInput(_whole(parameter.detach(), like), _whole(gradient, like), put_together)


def _whole(tensor: Tensor, like: DTensor | None) -> Tensor:
    if isinstance(tensor, DTensor) or like is None:
        return whole_of(tensor)
    if tensor.shape != local_of(like).shape or tensor.numel() == 1:
        return tensor
    spread = DTensor.from_local(
        tensor,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return whole_of(spread)


class Cuts:
    """The cuts by which a whole parameter becomes this rank's part.

    Args:
        parameter: The parameter.
        value: The whole of it.

    Raises:
        CanaryDeclined: It is shared in a way that is not known.
    """

    def __init__(self, parameter: Tensor, value: Tensor) -> None:
        self._cuts: list[tuple[str, int, int, int]] = []  # name of the axis, dim, parts, own part
        if not isinstance(parameter, DTensor):
            return
        mesh = parameter.device_mesh
        names = mesh.mesh_dim_names or ("",) * mesh.ndim
        for axis, placement in enumerate(parameter.placements):
            if placement.is_replicate():
                continue
            dim = getattr(placement, "dim", None)
            if dim is None:
                raise CanaryDeclined(f"a parameter is laid out over a mesh as {placement}")
            cut = names[axis], int(dim), mesh.size(axis), mesh.get_local_rank(axis)
            self._cuts.append(cut)
        local = local_of(parameter.detach())
        for _ in range(2):  # FSDP2 cuts what the axes after its own have cut
            self._cuts.reverse()
            own = self.part(value)
            if own.shape == local.shape and bool((own == local).all()):
                return
        raise CanaryDeclined("a parameter is laid out over a mesh in an order that is not known")

    def part(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, as a view."""
        for _, dim, parts, at in self._cuts:
            tensor = _cut(tensor, dim, parts, at)
        return tensor

    def steps(self, held: UpdateInput) -> Iterator[tuple[str, UpdateInput, "Cuts"]]:
        """Yield the parts after each cut: the axes so far in words, a part, the cuts to follow."""
        axes: list[str] = []
        for number, one in enumerate(self._cuts, start=1):
            axis, dim, parts, at = one
            if parts == 1:
                continue
            shape = held.value.shape
            parts_of = partial(_cut_alike, shape=shape, dim=dim, parts=parts, at=at)
            state = {name: parts_of(value) for name, value in held.state.items()}
            held = UpdateInput(parts_of(held.value), parts_of(held.gradient), state)
            axes.append(axis)
            rest = copy.copy(self)
            rest._cuts = self._cuts[number:]
            yield " and ".join(filter(None, axes)), held, rest


def _cut_alike(value: Any, *, shape: torch.Size, dim: int, parts: int, at: int) -> Any:
    """Return a part of what has this shape, and anything else as it is."""
    alike = isinstance(value, Tensor) and value.shape == shape
    return _cut(value, dim, parts, at) if alike else value


def _cut(tensor: Tensor, dim: int, parts: int, at: int) -> Tensor:
    cuts = tensor.chunk(parts, dim)
    return cuts[at] if at < len(cuts) else tensor.narrow(dim, 0, 0)

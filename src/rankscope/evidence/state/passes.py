"""State that changes between the forward passes of a step, where nothing should move it.

A few tensors in turn are copied, a few elements of each, as each forward pass begins and as the
optimizer is called. An average of the weights that is updated in ``forward`` moves with each
micro-batch, not with each step. No digest after the step shows that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from rankscope.bus.replicas import RUNNING_STATISTICS
from rankscope.gradients.host import HostCopy
from rankscope.gradients.names import canonical_name

_TENSORS = 4  # a step
_ELEMENTS = 256  # of each
_FEWEST_PASSES = 2


@dataclass(frozen=True, slots=True)
class PendingPasses:
    """Copies of a few tensors at moments of one step, perhaps still on the device."""

    copies: Sequence[HostCopy]  # one for each moment, as bytes
    names: Sequence[str]  # names of the tensors
    frozen: Sequence[bool]  # which of them are parameters that are not trained
    ends: Sequence[int]  # where the bytes of each end

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        return all(copy.ready for copy in self.copies)

    def read(self) -> list[tuple[str, int, bool]]:
        """Return name, number of changes, and whether it is frozen, of each that has changed."""
        moments = [np.split(copy.numpy(), self.ends[:-1]) for copy in self.copies]
        changes = [
            sum(not np.array_equal(a, b) for a, b in pairwise(each))
            for each in zip(*moments, strict=True)
        ]
        found = zip(self.names, changes, self.frozen, strict=True)
        return [(name, number, frozen) for name, number, frozen in found if number]


class _Chosen(NamedTuple):
    """A tensor that is copied in this step, and where the module holds it."""

    name: str
    held: Mapping[str, Any]
    key: str
    tensor: Tensor


class PassMeter:
    """Copies a few tensors of a model at each forward pass of a step, in turn.

    Left out are whole numbers (counters), and buffers of torch's own modules: running statistics,
    spectral norms and observers move with each forward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (canonical_name(f"{prefix}.{name}" if prefix else name), held, name)
            for prefix, part in module.named_modules()
            for held, names in ((part._parameters, part._parameters), (part._buffers, _own(part)))
            for name in names
        ]
        self._turn = 0
        self._passes = self._passes_before = 0
        self._chosen: list[_Chosen] = []
        self._ends: list[int] = []
        self._copies: list[HostCopy] = []

    def see(self, *, first: bool = False) -> None:
        """Copy the tensors in turn, where a forward pass begins."""
        if first:
            self._begin()
        self._passes += 1
        self._copy()

    def see_update(self) -> None:
        """Copy them once more, where the optimizer is first called."""
        if len(self._copies) == self._passes:
            self._copy()

    def collect(self) -> PendingPasses | None:
        """Return the step's copies; None where there are too few to compare."""
        copies = self._copies
        self._copies = []
        self._passes_before = self._passes
        self._passes = 0
        if len(copies) <= _FEWEST_PASSES:
            return None
        names = [each.name for each in self._chosen]
        tensors = [each.tensor for each in self._chosen]
        frozen = [isinstance(t, nn.Parameter) and not t.requires_grad for t in tensors]
        return PendingPasses(copies, names, frozen, self._ends)

    def _begin(self) -> None:
        self._copies = []
        self._chosen = []
        self._passes = 0
        if self._passes_before < _FEWEST_PASSES or not self._places:
            return
        turn = self._turn
        self._turn = (turn + _TENSORS) % len(self._places)
        for name, held, key in (*self._places, *self._places)[turn : turn + _TENSORS]:
            tensor = held.get(key)
            if tensor is not None and _is_plain(_local(tensor)):
                self._chosen.append(_Chosen(name, held, key, tensor))
        device = self._chosen[0].tensor.device if self._chosen else None
        self._chosen = [each for each in self._chosen if each.tensor.device == device]

    def _copy(self) -> None:
        if any(
            each.held.get(each.key) is not each.tensor or not _has_memory(each.tensor)
            for each in self._chosen
        ):
            self._chosen = []  # FSDP2 holds a shard in place of a parameter, or the reverse
        if not self._chosen:
            self._copies = []
            return
        with torch.no_grad():
            parts = [
                _local(tensor).detach().view(-1)[:_ELEMENTS].view(torch.uint8)
                for _, _, _, tensor in self._chosen
            ]
            self._ends = np.cumsum([len(part) for part in parts]).tolist()
            self._copies.append(HostCopy(torch.cat(parts), own=True))


def _own(module: nn.Module) -> list[str]:
    """Return the names of the buffers that a module's own code may move."""
    if type(module).__module__.startswith("torch.") or isinstance(module, _NormBase):
        return []
    return [name for name in module._buffers if name not in RUNNING_STATISTICS]


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _has_memory(tensor: Tensor) -> bool:
    return _local(tensor).untyped_storage().size() > 0


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the first elements can be read as bytes."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return (
        plain
        and tensor.is_floating_point()
        and not tensor.is_meta
        and _has_memory(tensor)
        and tensor.numel() > 0
        and tensor.is_contiguous()
    )

"""Which elements of a model's parameters lie in which tensors.

An optimizer may hold them in tensors of its own: DeepSpeed's ZeRO 1 to 3 and Megatron-core keep
flat shards, or copies in float32.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from rankscope.evidence.parity.figures import Part
from rankscope.wrappers.optimizers import memory_of


class Held(NamedTuple):
    """What an optimizer holds of a parameter in one of its tensors."""

    name: str
    # returns its part of a tensor of that shape: the tensor itself, a gradient, a moment
    part: Callable[[Tensor], Tensor | Part]


class HeldElements:
    """Finds the parameters of a model in an optimizer's tensors.

    ``firsts`` has the first element that a rank holds in ``main_param``, by parameter's name: those
    of Megatron-core's distributed optimizer. Other copies of that name are whole, as are
    ``copies``, the pairs of a parameter and what an optimizer of the loop's own trains for it.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Mapping[int, str],
        firsts: Mapping[str, int],
        copies: Iterable[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self._module = module
        self._names = names
        self._firsts = firsts
        self._copies = {id(parameter): copy for parameter, copy in copies}
        self._known: dict[int, tuple[Held, ...]] = {}
        self._by_memory: dict[int, list[tuple[str, Part]]] = {}

    def in_tensor(self, tensor: Tensor) -> tuple[Held, ...]:
        """Return the parameters that an optimizer's tensor holds elements of; none of another's."""
        name = self._names.get(id(tensor))
        if name is not None:
            return (Held(name, lambda same: same),)
        found = self._known.get(id(tensor))
        if found is None:
            found = self._known[id(tensor)] = tuple(self._pieces_in(tensor))
        return found

    def masters_of(self, parameter: Tensor) -> Iterator[Part]:
        """Yield the parts of a parameter that an optimizer trains in its place."""
        mapping: Any = getattr(parameter, "_hp_mapping", None)
        owner: Any = getattr(parameter, "_z3_optimizer", None)
        copy: Any = getattr(parameter, "main_param", self._copies.get(id(parameter)))
        if owner is not None:
            group, start, _ = owner.grad_position[owner.get_param_id(parameter)]
            first, length, size = _share_of(parameter)
            if length:
                yield _cut(start, length, size, first, owner.fp32_partitioned_groups_flat[group])
        elif mapping is not None:
            fragment = mapping.hp_fragment
            first = mapping.lp_fragment_address.start
            yield _cut(0, fragment.numel(), parameter.numel(), first, fragment)
        elif copy is not None:
            first = self._firsts.get(self._names.get(id(parameter), ""), 0)
            yield _cut(0, copy.numel(), parameter.numel(), first, copy)

    def _pieces_in(self, flat: Tensor) -> Iterator[Held]:
        memory = memory_of(flat)
        if not self._by_memory:
            self._look()
        begin = int(flat.storage_offset())
        for name, part in self._by_memory.get(memory, ()):
            at = int(part.tensor.storage_offset())
            low = max(at, begin)
            high = min(at + part.tensor.numel(), begin + flat.numel())
            if low < high:
                first = part.first[0] + low - at
                yield Held(
                    name, functools.partial(_cut, low - begin, high - low, part.shape[0], first)
                )

    def _look(self) -> None:
        """Note where in memory the parameters lie, and what an optimizer trains in their place."""
        for parameter in self._module.parameters():
            name = self._names.get(id(parameter))
            if name is None:
                continue
            parts = list(self.masters_of(parameter))
            if memory_of(parameter) and parameter.is_contiguous():
                parts.append(_cut(0, parameter.numel(), parameter.numel(), 0, parameter))
            for part in parts:
                self._by_memory.setdefault(memory_of(part.tensor), []).append((name, part))


def is_partitioned(parameter: Tensor) -> bool:
    """Return whether ZeRO 3 shards a parameter: outside of its layer, only a shard is there."""
    return hasattr(parameter, "ds_tensor")


def size_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter or buffer, also of one that ZeRO 3 shards."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def stored(tensor: Tensor) -> Tensor | Part:
    """Return what a rank holds of a parameter: under ZeRO 3 its shard, else the tensor."""
    if not is_partitioned(tensor):
        return tensor
    first, length, size = _share_of(tensor)
    return _cut(0, length, size, first, tensor.ds_tensor)  # type: ignore[attr-defined]


def _share_of(parameter: Any) -> tuple[int, int, int]:
    """Return where this rank's shard under ZeRO 3 begins, its length, and that of all."""
    size, shard = int(parameter.ds_numel), int(parameter.partition_numel())
    first = min(dist.get_rank(parameter.ds_process_group) * shard, size)
    return first, min(shard, size - first), size


def _cut(start: int, length: int, size: int, first: int, flat: Tensor) -> Part:
    return Part(flat.detach().view(-1).narrow(0, start, length), (size,), (first,))

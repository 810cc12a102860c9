"""The digest schedule: which parameters and buffers of a model are compared in which slot.

It depends on names, shapes and types alone. So workers with equal models choose the same items.
"""

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from rankscope.bus.replicas import RUNNING_STATISTICS, StateKind
from rankscope.evidence.state.roles import MOST_NAMED, Role, Roles, role_word
from rankscope.gradients.digest import PendingDigest, digest_bits, known_shape, word_of
from rankscope.gradients.names import canonical_name
from rankscope.private import find

Kinds = tuple[StateKind, ...]
_NORMS: type[nn.Module] = find("torch.nn.modules.batchnorm._NormBase") or nn.Module
_OF_BUFFERS: Mapping[bool | None, Kinds] = {
    True: (StateKind.STATISTICS, StateKind.BROADCAST),
    False: (StateKind.STATISTICS,),
    None: (StateKind.BUFFER,),
}
_SHARD = (StateKind.REDUCED, StateKind.APPLIED)
TensorLookup = Callable[[nn.Module, str], Tensor | None]
"""Returns the lasting tensor of a module's parameter, which is replaced while the model computes;
None for a parameter that each worker may have for itself."""

_SHARDED = frozenset(
    {
        "DeepSpeedZeroOptimizer",
        "DeepSpeedZeroOptimizer_Stage3",
        "DistributedFusedAdam",
        "DistributedOptimizer",
        "OSS",
        "ZeroRedundancyOptimizer",
    }
)
_LEAST_BYTES = 1 << 18  # of a slot, so that small models need few of them
_GROWTH = (1.0, 1.15, 1.4, 1.8, 2.5, 4.0, 8.0, 16.0)  # of a slot's bytes, until the slots suffice


def held_tensor(tensors: Any, key: str) -> Tensor | None:
    """Return what a module holds by this name; a module of TorchScript does not have a ``dict``."""
    return tensors[key] if key in tensors else None  # noqa: SIM401


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a tensor in a model; the tensor there may be replaced."""

    name: str  # canonical
    holder: nn.Module
    key: str  # its name in ``holder``
    is_buffer: bool

    def current(self, lookup: TensorLookup | None = None) -> Tensor | None:
        """Return the tensor in this place now, or its lasting one."""
        found = self.holder._buffers if self.is_buffer else self.holder._parameters
        tensor = held_tensor(found, self.key)
        if tensor is None or self.is_buffer or lookup is None:
            return tensor
        return lookup(self.holder, self.key)


class FoundState(NamedTuple):
    """A parameter or buffer of a model; equal on workers with equal models, but for the module."""

    holder: nn.Module  # module that it belongs to
    name: str  # canonical
    key: str  # its name in the module
    is_buffer: bool
    shape: tuple[int, ...]  # its shape; of a DTensor, that of the whole
    length: int  # elements on a worker; of a DTensor, about a shard's
    dtype: torch.dtype
    trained: bool  # it requires a gradient
    broadcast: bool | None = None  # of a running statistic: by DDP before each step; else None


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements ``[start, stop)`` of a tensor of ``length`` elements; None for its end."""

    place: TensorPlace
    length: int
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor, a range of it, or several small ones, with one digest for each of its kinds."""

    name: str
    kinds: Kinds
    bytes: int  # without the optimizer's state
    slices: tuple[Slice, ...]

    @property
    def whole(self) -> bool:
        """Whether no part of its tensor is in another item."""
        return self.slices[0].start == 0 and self.slices[0].stop is None


class DigestSchedule:
    """The slots in which a model's parameters and buffers are compared, one after the other."""

    def __init__(
        self,
        found: Sequence[FoundState],  # parameters and buffers of the model
        *,
        replicated: bool,  # if not, only buffers are compared
        shards: bool = False,  # compare gradients of parameters that are not replicated as well
        called: bool,  # the optimizer's call can be observed
        kept: bool,  # the optimizer's state is compared, of all trained parameters
        num_slots: int,  # of one cycle, at most
        max_items: int,  # digests of a slot, at most
    ) -> None:
        self.found = found
        end = 8 if replicated else 7  # owners may train different parameters
        words = [f"{each.name} {each[3:5]} {each[6:end]}" for each in found]
        self.layout = word_of(f"{replicated} {called} " + "\n".join(words)) >> 1
        kinds = (_kinds(each, called=called, kept=kept) if replicated else _SHARD for each in found)
        parameters = [
            _item(each, of)
            for each, of in zip(found, kinds, strict=True)
            if not each.is_buffer and (replicated or (shards and called and each.trained))
        ]
        buffers = [_item(each, _OF_BUFFERS[each.broadcast]) for each in found if each.is_buffer]
        share = max(1, max_items // 8) if parameters else max_items
        rest = max_items - share if buffers else max_items
        self._cycles = (_deal(parameters, num_slots, rest), _deal(buffers, num_slots, share))
        self._lengths = tuple(len(slots) for slots in self._cycles)
        self.length = max(self._lengths)
        """Slots of a cycle."""

    def place(self, number: int) -> tuple[int, ...]:
        """Return the place of a slot in the cycle; slots of equal places have equal items."""
        return tuple([number % length for length in self._lengths])

    def items(self, number: int) -> list[Item]:
        """Return the items of a slot: parameters, then buffers."""
        return [item for slots in self._cycles for item in slots[number % len(slots)]]


def survey(
    module: nn.Module,
    left_out: Container[str] = (),  # that each worker may have for itself
    lookup: TensorLookup | None = None,
    *,
    broadcast: bool = False,  # DDP broadcasts buffers
) -> list[FoundState]:
    """Return the parameters and buffers of a model, each once, in the order of its modules."""
    found: list[FoundState] = []
    seen: set[int] = set()
    for place in _places_of(module):
        holder = place.holder
        key = place.key
        is_buffer = place.is_buffer
        tensor = place.current(lookup)
        if tensor is None or id(tensor) in seen or place.name in left_out:
            continue
        seen.add(id(tensor))
        shape, length = known_size(tensor)
        name = canonical_name(place.name)
        trained = tensor.requires_grad
        each = FoundState(holder, name, key, is_buffer, shape, length, tensor.dtype, trained)
        apart = (  # a forward pass in training changes it differently on each worker
            is_buffer
            and key in RUNNING_STATISTICS
            and issubclass(kind := _kind_of(holder), _NORMS)
            and not issubclass(kind, nn.SyncBatchNorm)
        )
        found.append(each._replace(broadcast=broadcast) if apart else each)
    return found


def _kind_of(module: nn.Module) -> type:
    """Return a module's class; of one in TorchScript, torch's class that it was made of, if any."""
    name: Any = module.original_name if isinstance(module, torch.jit.ScriptModule) else ""
    found = getattr(nn, name, None)
    return found if isinstance(found, type) else type(module)


def _places_of(module: nn.Module) -> Iterator[TensorPlace]:
    """Yield the places of a model's parameters and buffers, module by module."""
    for prefix, holder in module.named_modules():
        for is_buffer, tensors in ((False, holder._parameters), (True, holder._buffers)):
            for key in tensors.keys():  # noqa: SIM118
                yield TensorPlace(f"{prefix}.{key}" if prefix else key, holder, key, is_buffer)


def is_sharded(optimizer: object) -> bool:
    """Return whether an optimizer, or one that it wraps, is of a kind that shards its state."""
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    inner = getattr(optimizer, "optimizer", None)
    return bool(names & _SHARDED) or (inner is not None and is_sharded(inner))


def known_size(tensor: Tensor) -> tuple[tuple[int, ...], int]:
    """Return a tensor's shape and its elements on a worker."""
    shape = getattr(tensor, "ds_shape", None) or known_shape(tensor)  # the former: of ZeRO 3
    if not shape and is_lazy(tensor):
        return (), 0
    if -1 in shape:
        return tuple(shape), 0
    length = math.prod(shape)
    if isinstance(tensor, DTensor):
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
            length = -(-length // size) if placement.is_shard() else length
    return tuple(shape), length


def _kinds(each: FoundState, *, called: bool, kept: bool) -> Kinds:
    if not each.trained:
        return (StateKind.PARAMETER,)
    optimizer = (StateKind.OPTIMIZER,) if kept else ()
    applied = (StateKind.APPLIED,) if called else ()
    return (StateKind.PARAMETER, *optimizer, StateKind.REDUCED, *applied)


def _item(each: FoundState, kinds: Kinds) -> Item:
    place = TensorPlace(each.name, each.holder, each.key, each.is_buffer)
    size = each.length * each.dtype.itemsize
    return Item(place.name, kinds, size, (Slice(place, each.length),))


def _deal(whole: list[Item], num_slots: int, max_items: int) -> list[list[Item]]:
    """Deal items out to slots: at most ``max_items`` digests in each, and about as many bytes."""
    if not whole:
        return [[]]
    total = sum(item.bytes for item in whole)
    crowd = sum(len(item.kinds) for item in whole) / (max_items * num_slots)
    slots: list[list[Item]] = [[]]
    for growth in _GROWTH:
        budget = max(_LEAST_BYTES, math.ceil(growth * total / num_slots))
        cut = [part for item in whole for part in _cut(item, budget)]
        slots = _fill(_joined(cut, budget, math.ceil(growth * crowd)), budget, max_items)
        if len(slots) <= num_slots:
            break
    return slots


def _fill(items: Iterable[Item], budget: int, max_items: int) -> list[list[Item]]:
    slots: list[list[Item]] = [[]]
    size = count = 0
    for item in items:
        size += item.bytes
        count += len(item.kinds)
        if slots[-1] and (size > budget or count > max_items):
            slots.append([])
            size = item.bytes
            count = len(item.kinds)
        slots[-1].append(item)
    return slots


def _cut(item: Item, budget: int) -> Iterator[Item]:
    """Yield ranges of one tensor; the last runs to its end, however long a shard is."""
    (whole,) = item.slices
    parts = min(-(-item.bytes // budget), whole.length)
    if parts < 2:
        yield item
        return
    cuts = [whole.length * part // parts for part in range(parts + 1)]
    for first, last in pairwise(cuts):
        stop = None if last == whole.length else last
        yield Item(
            f"{item.name}[{first}:{last}]",
            item.kinds,
            (last - first) * (item.bytes // whole.length),
            (replace(whole, start=first, stop=stop),),
        )


def _joined(items: Iterable[Item], budget: int, most: int) -> Iterator[Item]:
    """Yield items of up to ``most`` neighbours each, of at most ``budget`` bytes in all."""
    group: list[Item] = []
    for item in items:
        if group and not (
            len(group) < most
            and item.kinds == group[0].kinds
            and item.whole
            and group[0].whole
            and sum(other.bytes for other in group) + item.bytes <= budget
        ):
            yield _one_of(group)
            group = []
        group.append(item)
    if group:
        yield _one_of(group)


def _one_of(group: list[Item]) -> Item:
    if len(group) == 1:
        return group[0]
    return Item(
        f"{group[0].name} … {group[-1].name} ({len(group)} tensors)",
        group[0].kinds,
        sum(item.bytes for item in group),
        tuple(part for item in group for part in item.slices),
    )


def read_roles(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    left_out: Container[str] = (),
    lookup: TensorLookup | None = None,
) -> tuple[Roles, dict[str, Tensor]]:
    """Return the roles of a model's parameters, and those that are trained and not reduced.

    A shared parameter has a role for each of its names. Those that are not reduced have their name
    and shape; the wrapper does not reduce those named in ``left_out``. ``lookup`` returns the
    lasting tensor of a parameter, None if all parameters last.
    """
    groups = () if is_sharded(optimizer) else getattr(optimizer, "param_groups", ())
    counts = Counter(id(parameter) for group in groups for parameter in group["params"])
    words: dict[str, int] = {}
    first_names: dict[int, str] = {}
    alone: dict[str, Tensor] = {}
    for name, tensor in _parameters_of(module, lookup):
        first = first_names.setdefault(id(tensor), name)
        count = counts[id(tensor)]
        role = _role(tensor.requires_grad, count > 0, count > 1, name in left_out)
        words[canonical_name(name)] = role_word(role, "" if first == name else first)
        if tensor.requires_grad and name in left_out and len(alone) < MOST_NAMED:
            alone[f"{name} {known_size(tensor)[0]}"] = tensor
    return Roles(tuple(words), tuple(words.values())), alone


def replaced_parameters(
    module: nn.Module, optimizer: object, lookup: TensorLookup | None = None
) -> dict[str, Tensor]:
    """Return the parameters in whose place an optimizer holds other tensors, by canonical name.

    They have a gradient, and no group of the optimizer has them. As many tensors of their shape in
    the groups are no parameters of the model, and have neither a gradient nor a state: so copies
    that an optimizer updates do not count. ``lookup`` is as in :func:`read_roles`.
    """
    groups = () if is_sharded(optimizer) else getattr(optimizer, "param_groups", ())
    held = {id(parameter): parameter for group in groups for parameter in group["params"]}
    own = {id(tensor): (name, tensor) for name, tensor in _parameters_of(module, lookup)}
    others = Counter(
        known_size(tensor)[0]
        for key, tensor in held.items()
        if key not in own and tensor.requires_grad and tensor.is_leaf and tensor.grad is None
        and not optimizer_state(optimizer, tensor)
    )  # fmt: skip
    left = [one for key, one in own.items() if key not in held] if others else []
    left = [(name, tensor) for name, tensor in left if tensor.is_leaf and tensor.grad is not None]
    sizes = Counter(known_size(tensor)[0] for _, tensor in left)
    found = {
        canonical_name(name): tensor
        for name, tensor in left
        if tensor.requires_grad and sizes[shape := known_size(tensor)[0]] <= others[shape]
    }
    return dict(list(found.items())[:MOST_NAMED])


def _parameters_of(module: nn.Module, lookup: TensorLookup | None) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's parameters with all of their names."""
    for place in _places_of(module):
        tensor = None if place.is_buffer else place.current(lookup)
        if tensor is not None:
            yield place.name, tensor


@cache
def _role(trained: bool, owned: bool, twice: bool, apart: bool) -> Role:
    flags = (Role.TRAINED, Role.OWNED, Role.TWICE, Role.LEFT_OUT)
    held = (trained, owned, twice, apart)
    return Role(sum(flag for flag, holds in zip(flags, held, strict=True) if holds))


_MODULUS = 1 << 64
_of_tensor = attrgetter("shape", "dtype", "requires_grad")
_held = attrgetter("_modules", "_parameters", "_buffers")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))

Leaf = tuple[int, Tensor | int, int, int | None]
"""An odd weight; a tensor, or the digest of a plain value; and the tensor's range that counts."""


def optimizer_state(optimizer: object, parameter: Tensor) -> object:
    """Return the optimizer state of a parameter; None without."""
    states = getattr(optimizer, "state", None)
    return states.get(parameter) if isinstance(states, Mapping) else None


def digest_optimizer(optimizer: object, parameter: Tensor, part: Slice) -> PendingDigest:
    """Return a digest of the optimizer state of a slice of a parameter; 0 without."""
    digest = PendingDigest()
    state = optimizer_state(optimizer, parameter)
    for weight, leaf, start, stop in () if state is None else state_leaves(state, part):
        each = PendingDigest(leaf) if isinstance(leaf, int) else digest_bits(leaf, start, stop)
        digest.add(each, weight)
    return digest


def state_leaves(state: object, part: Slice, weight: int = 1) -> Iterator[Leaf]:
    """Yield the leaves of a state: its digest is the weighted sum of their digests."""
    if isinstance(state, Tensor):
        yield weight, state, *_share(state, part)
        return
    pairs: Iterable[tuple[object, object]]
    if isinstance(state, Mapping):
        pairs = state.items()
    elif isinstance(state, (list, tuple)):
        pairs = enumerate(state)
    else:
        plain = f"{type(state).__name__} {state!r}" if isinstance(state, _PLAIN) else type(state)
        yield weight, word_of(f"value {plain}"), 0, None
        return
    yield weight, _word_of_length(len(state)), 0, None
    for key, value in pairs:  # in any order: they are added up
        inner = weight * _weight_of(str(key)) % _MODULUS
        if isinstance(value, Tensor):
            yield inner, value, *_share(value, part)
        else:
            yield from state_leaves(value, part, inner)


@lru_cache(maxsize=4096)
def _word_of_length(length: int) -> int:
    return word_of(f"{length} values")


@lru_cache(maxsize=4096)
def _weight_of(key: str) -> int:
    return word_of(f"key {key}") | 1


def _share(state: Tensor, part: Slice) -> tuple[int, int | None]:
    """Return the range of a state tensor that belongs to a range of its parameter."""
    if part.start == 0 and part.stop is None:
        return 0, None
    length = (state.to_local() if isinstance(state, DTensor) else state).numel()
    if length < 2:
        return 0, None
    stop = None if part.stop is None else part.stop * length // part.length
    return part.start * length // part.length, stop


def signature(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[object] | None:
    """Return a signature that is equal while model and optimizer have not changed, if any."""
    try:
        groups = [group["params"] for group in getattr(optimizer, "param_groups", ())]
        holders = [module]
        seen = {id(module)}
        for holder in holders:
            for inner in holder._modules.values():
                if inner is not None and id(inner) not in seen:
                    seen.add(id(inner))
                    holders.append(inner)
        held = list(chain.from_iterable(map(_held, holders)))
        values = list(chain.from_iterable(map(dict.values, held)))
        tensors = [value for value in values if isinstance(value, Tensor)]
        return [
            [list(map(id, group)) for group in groups],
            list(map(list, held)),
            list(map(id, values)),
            list(map(_of_tensor, tensors)),
        ]
    except Exception:
        return None

"""What an optimizer holds of a model: the roles of its parameters, and the parts of its state."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rankscope.evidence.state.plan import Lasting, Slice, TensorPlace, is_sharded, known_size
from rankscope.evidence.state.roles import MOST_NAMED, Role, Roles, role_word
from rankscope.gradients.digest import PendingDigest, digest_bits, word_of
from rankscope.gradients.names import canonical_name


class ParameterRoles(NamedTuple):
    """The roles of a model's parameters, and those that are trained and not reduced."""

    roles: Roles
    left_out: dict[str, Tensor]  # by name and shape


def read_roles(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    left_out: Container[str] = (),
    lasting: Lasting | None = None,
) -> ParameterRoles:
    """Return the roles of a model's parameters; a shared one has a role for each of its names.

    The wrapper does not reduce those named in ``left_out``; ``lasting`` returns the lasting tensor
    of a parameter, None if all parameters last.
    """
    groups = () if is_sharded(optimizer) else getattr(optimizer, "param_groups", ())
    counts = Counter(id(parameter) for group in groups for parameter in group["params"])
    words: dict[str, int] = {}
    first_names: dict[int, str] = {}
    alone: dict[str, Tensor] = {}
    for name, tensor in _parameters_of(module, lasting):
        first = first_names.setdefault(id(tensor), name)
        role = _role(tensor, counts[id(tensor)], apart=name in left_out)
        words[canonical_name(name)] = role_word(role, "" if first == name else first)
        if {Role.TRAINED, Role.LEFT_OUT} <= set(role) and len(alone) < MOST_NAMED:
            alone[f"{name} {known_size(tensor)[0]}"] = tensor
    return ParameterRoles(Roles(tuple(words), tuple(words.values())), alone)


def replaced_parameters(
    module: nn.Module, optimizer: object, lasting: Lasting | None = None
) -> dict[str, Tensor]:
    """Return the parameters in whose place an optimizer holds other tensors, by canonical name.

    They have a gradient, and no group of the optimizer has them. As many tensors of their shape in
    the groups are no parameters of the model, and have neither a gradient nor a state: so copies
    that an optimizer updates do not count. ``lasting`` is as in :func:`read_roles`.
    """
    groups = () if is_sharded(optimizer) else getattr(optimizer, "param_groups", ())
    held = {id(parameter): parameter for group in groups for parameter in group["params"]}
    own = {id(tensor): (name, tensor) for name, tensor in _parameters_of(module, lasting)}
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


def _parameters_of(module: nn.Module, lasting: Lasting | None) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's parameters with all of their names."""
    for prefix, holder in module.named_modules():
        for key in holder._parameters:
            place = TensorPlace(f"{prefix}.{key}" if prefix else key, holder, key, is_buffer=False)
            tensor = place.current(lasting)
            if tensor is not None:
                yield place.name, tensor


def _role(tensor: Tensor, count: int, *, apart: bool) -> Role:
    role = Role(0)
    for flag, holds in (
        (Role.TRAINED, tensor.requires_grad),
        (Role.OWNED, count > 0),
        (Role.TWICE, count > 1),
        (Role.LEFT_OUT, apart),
    ):
        role |= flag if holds else Role(0)
    return role


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
    """Return a signature of a model and its optimizer, which is equal while neither has changed.

    None where there is none, as of parameters that have no shape yet.
    """
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

"""Reads the role of each parameter of a model in the training."""

from collections import Counter
from collections.abc import Container, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rankscope.evidence.state.leaves import optimizer_state
from rankscope.evidence.state.plan import Lasting, TensorPlace, is_sharded, known_size
from rankscope.evidence.state.roles import MOST_NAMED, Role, Roles, role_word
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

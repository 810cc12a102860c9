"""Reads the role of each parameter of a model in the training."""

from collections import Counter
from collections.abc import Container
from typing import NamedTuple

import torch
from torch import Tensor, nn

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
    for prefix, holder in module.named_modules():
        for key in holder._parameters:
            place = TensorPlace(f"{prefix}.{key}" if prefix else key, holder, key, is_buffer=False)
            tensor = place.current(lasting)
            if tensor is None:
                continue
            first = first_names.setdefault(id(tensor), place.name)
            role = _role(tensor, counts[id(tensor)], apart=place.name in left_out)
            words[canonical_name(place.name)] = role_word(
                role, "" if first == place.name else first
            )
            if {Role.TRAINED, Role.LEFT_OUT} <= set(role) and len(alone) < MOST_NAMED:
                alone[f"{place.name} {known_size(tensor)[0]}"] = tensor
    return ParameterRoles(Roles(tuple(words), tuple(words.values())), alone)


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

"""Which parameters' updates are computed again in a step: some of each kind, in turn."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.evidence.canary.layout import layout_of

MOST = 8
"""Parameters of one optimizer whose update is computed again, in a large model."""

_MOST_OF_SMALL = 64
_SMALL = 2**22
"""Elements of all parameters up to which all of them are chosen."""

LARGEST = 2**26
"""Elements of all parameters that are chosen, at most: copies must fit beside the training."""


class Chosen(NamedTuple):
    """A parameter whose update is computed again."""

    name: str
    parameter: Tensor
    group: int


def choose(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], turn: int
) -> tuple[list[Chosen], int]:
    """Return some parameters of an optimizer, and the number of those that it trains.

    Parameters of one group and type that have the same shape and layout are of one kind. A small
    model's are all chosen, a large one's one by one from each kind.

    Args:
        optimizer: The optimizer.
        names: Names of parameters by their ids.
        turn: A number that rises, and is equal on all ranks.
    """
    kinds: dict[tuple[Any, ...], list[Chosen]] = {}
    every = []
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if not parameter.requires_grad or not parameter.is_floating_point():
                continue
            name = names.get(id(parameter), f"parameter {place} of group {number}")
            one = Chosen(name, parameter, number)
            every.append(one)
            if parameter.layout is torch.strided:
                layout = layout_of(parameter)
                kind = number, parameter.dtype, tuple(parameter.shape), layout and layout[1]
                kinds.setdefault(kind, []).append(one)
    small = sum(one.parameter.numel() for one in every) <= _SMALL
    if small:
        fitting = [one for of_kind in kinds.values() for one in of_kind]
        return _from(fitting, turn, _MOST_OF_SMALL), len(every)
    picked = _from([of_kind[turn % len(of_kind)] for of_kind in kinds.values()], turn, MOST)
    room = LARGEST
    fitting = []
    for one in sorted(picked, key=lambda each: each.parameter.numel()):
        room -= one.parameter.numel()
        fitting += [one] if room >= 0 else []
    return fitting, len(every)


def _from(each: Sequence[Chosen], turn: int, most: int) -> list[Chosen]:
    """Return at most so many, those in turn."""
    first = turn * most % len(each) if len(each) > most else 0
    return [*each[first:], *each[:first]][:most]

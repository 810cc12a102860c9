"""Weights that pipeline stages share: tensors of equal content, which have to stay equal.

An embedding and a head that are tied live in two stages as two tensors. They begin alike, and only
equal gradients keep them alike: those of both stages have to be added up before the optimizer's
call.

Equal content alone is no proof: constant tensors are equal by chance, and so are tensors that one
seed or one definition of a layer gives to several stages.
"""

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.gradients.digest import digest_tensor
from rankscope.wrappers.fsdp2_model import ManagedParameter

_log = logging.getLogger("rankscope")


class Held(NamedTuple):
    """A parameter of one stage that is not constant.

    Attributes:
        name: Its name.
        shape: Its shape; of a DTensor, that of the whole.
        digest: Digest of this rank's part.
        before: Number of elements in such parameters before it, in the order of the model.
    """

    name: str
    shape: tuple[int, ...]
    digest: int
    before: int


@dataclass(frozen=True, slots=True)
class Tie:
    """A weight that several stages hold.

    Attributes:
        names: Its name on each rank along the axis that holds it, by place.
        certain: Whether neither one seed nor one layer explains that they are equal.
    """

    names: Mapping[int, str]
    certain: bool

    @property
    def label(self) -> str:
        """Its names together, the same on all ranks."""
        return " = ".join(dict.fromkeys(self.names[at] for at in sorted(self.names)))


def find_ties(held_T: Sequence[Sequence[Held]]) -> list[Tie]:
    """Return the weights that several stages hold.

    Tensors that have a twin in their own stage are left out. If most tensors of a stage are
    equal to another one's by what a seed or a layer explains, they are no ties.

    Args:
        held_T: The parameters of each rank along the axis of the stages, in its order.

    Example:
        >>> first = [Held("embedding", (9, 4), 1, 0), Held("block.0", (4, 4), 2, 36)]
        >>> last = [Held("block.0", (4, 4), 3, 0), Held("head", (9, 4), 1, 16)]
        >>> [(tie.label, tie.certain) for tie in find_ties([first, last])]
        [('embedding = head', True)]
        >>> find_ties([last, last])  # one seed in two equal stages
        []
    """
    found: defaultdict[tuple[object, ...], dict[int, Held]] = defaultdict(dict)
    for place, held in enumerate(held_T):
        count = Counter(one.digest for one in held)
        for one in held:
            if count[one.digest] == 1:
                found[one.digest, one.shape][place] = one
    ties = [
        Tie(
            {place: one.name for place, one in same.items()},
            not any(_may_coincide(one, other) for one, other in combinations(same.values(), 2)),
        )
        for same in found.values()
        if len(same) > 1
    ]
    by_chance = Counter(place for tie in ties if not tie.certain for place in tie.names)
    if any(2 * count > len(held_T[place]) for place, count in by_chance.items()):
        return [tie for tie in ties if tie.certain]
    return ties


def _may_coincide(one: Held, other: Held) -> bool:
    """Return whether one seed, or one definition of a layer, explains equal content."""
    role = re.sub(r"\d+", "#", one.name)
    same_layer = "#" in role and role == re.sub(r"\d+", "#", other.name)
    return one.before == other.before or same_layer


@torch.no_grad()
def held_by(parameters: Sequence[ManagedParameter]) -> list[Held]:
    """Return the parameters that are not constant, as this rank holds them; waits for the device.

    Args:
        parameters: All parameters of the stage, in the order of the model.
    """
    found: list[Held] = []
    before = 0
    for parameter in parameters:
        tensor = parameter.tensor.detach()
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        try:
            if not _varies(local):
                continue
            digest = int(digest_tensor(local))
        except Exception as error:  # a tensor of an unusual kind
            _log.debug("%s is not compared with other stages: %s", parameter.name, error)
            continue
        found.append(Held(parameter.name, tuple(tensor.shape), digest, before))
        before += tensor.numel()
    return found


def _varies(tensor: Tensor) -> bool:
    if tensor.is_meta or not tensor.numel():
        return False
    smallest, largest = torch.aminmax(tensor)
    return not bool(smallest == largest)

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


class StageParameter(NamedTuple):
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
        names: Its name in each stage that holds it, by the stage's number.
        certain: Whether neither one seed nor one layer explains that they are equal.
    """

    names: Mapping[int, str]
    certain: bool

    @property
    def label(self) -> str:
        """Its names together, the same on all ranks."""
        return " = ".join(dict.fromkeys(self.names[at] for at in sorted(self.names)))


def find_ties(
    held_T: Sequence[Sequence[StageParameter]], ranks_T: Sequence[int] | None = None
) -> list[Tie]:
    """Return the weights that stages of several ranks hold.

    Tensors that have a twin on their own rank are left out, and so are those of stages most of
    whose tensors are equal by what a seed or a layer explains.

    Args:
        held_T: The parameters of each stage.
        ranks_T: The rank of each stage, by its place along their axis; one for each if left out.

    Example:
        >>> block = StageParameter("block.0", (4, 4), 2, 36)
        >>> first = [StageParameter("embedding", (9, 4), 1, 0), block]
        >>> last = [block._replace(digest=3, before=0), StageParameter("head", (9, 4), 1, 16)]
        >>> [(tie.label, tie.certain) for tie in find_ties([first, last])]
        [('embedding = head', True)]
        >>> find_ties([last, last])  # one seed in two equal stages
        []
    """
    ranks_T = range(len(held_T)) if ranks_T is None else ranks_T
    stages = list(zip(ranks_T, held_T, strict=True))
    counts = Counter((rank, one.digest) for rank, held in stages for one in held)
    found: defaultdict[tuple[object, ...], dict[int, StageParameter]] = defaultdict(dict)
    for number, (rank, held) in enumerate(stages):
        for one in held:
            if counts[rank, one.digest] == 1:
                found[one.digest, one.shape][number] = one
    ties = [
        Tie(
            {number: one.name for number, one in same.items()},
            not any(_may_coincide(one, other) for one, other in combinations(same.values(), 2)),
        )
        for same in found.values()
        if len(same) > 1
    ]
    by_chance = Counter(number for tie in ties if not tie.certain for number in tie.names)
    seeded = {number for number, count in by_chance.items() if 2 * count > len(held_T[number])}
    return [tie for tie in ties if tie.certain or not tie.names.keys() <= seeded]


def _may_coincide(one: StageParameter, other: StageParameter) -> bool:
    """Return whether one seed, or one definition of a layer, explains equal content."""
    role = re.sub(r"\d+", "#", one.name)
    same_layer = "#" in role and role == re.sub(r"\d+", "#", other.name)
    return one.before == other.before or same_layer


@torch.no_grad()
def held_by(parameters: Sequence[ManagedParameter]) -> list[StageParameter]:
    """Return the parameters that are not constant, as this rank holds them; waits for the device.

    Args:
        parameters: All parameters of the stage, in the order of the model.
    """
    found: list[StageParameter] = []
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
        found.append(StageParameter(parameter.name, tuple(tensor.shape), digest, before))
        before += tensor.numel()
    return found


def _varies(tensor: Tensor) -> bool:
    if tensor.is_meta or not tensor.numel():
        return False
    smallest, largest = torch.aminmax(tensor)
    return not bool(smallest == largest)

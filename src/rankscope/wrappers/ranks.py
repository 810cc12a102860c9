"""The ranks of a process group, and what a rank holds of a tensor."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; a plain one as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of a process group, in its order.

    torch returns them as they were given to it: perhaps as numbers of numpy, which JSON refuses.
    """
    return [int(rank) for rank in dist.get_process_group_ranks(group)]


def num_collectives(groups: Iterable[dist.ProcessGroup]) -> int:
    """Return how many collectives this rank has begun in process groups; 0 where none counts."""
    return sum(map(_num_collectives, groups))


def _num_collectives(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):  # some backends have no number
        return 0

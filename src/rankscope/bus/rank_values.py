"""Values that should be equal on all ranks, as words."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.replicas import majority
from rankscope.bus.words import listed, name_ranks
from rankscope.stats.arrays import Ints

_T = TypeVar("_T", bound=Hashable)

_MOST_GROUPS = 4


def known_values(values_W: NDArray[Any], known_W: NDArray[np.bool_]) -> list[Any]:
    """Return values of the workers as a list, None where one is unknown."""
    return [v if known else None for v, known in zip(values_W.tolist(), known_W, strict=True)]


def name_values(values: Sequence[_T | None], word: Callable[[_T], str] = str) -> str:
    """Return values and their ranks: ``0.3 on rank 3, 0.1 on the others``.

    ``values`` has one per rank, None where it is unknown.
    """
    ranks: dict[_T, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            ranks.setdefault(value, []).append(rank)
    common = majority(Counter({value: len(own) for value, own in ranks.items()}))
    rest = [value for value in ranks if value != common]
    parts = [f"{word(value)} on {name_ranks(ranks[value])}" for value in rest[:_MOST_GROUPS]]
    if len(rest) > _MOST_GROUPS:
        others = sum(len(ranks[value]) for value in rest[_MOST_GROUPS:])
        parts.append(f"other values on {others} more")
    if common is not None:
        parts.append(f"{word(common)} on the others")
    return ", ".join(parts)


def copied_values(now_W: Ints, saved_W: Ints, ranks: Iterable[int]) -> str:
    """Return whose saved values some ranks hold, in words; empty unless each holds another's.

    Values that several ranks had saved alike prove nothing.

    Example:
        >>> copied_values(np.array([5, 5, 5]), np.array([5, 6, 7]), [1, 2])
        "ranks 1 and 2 hold rank 0's"
    """
    owners = {value: rank for rank, value in enumerate(saved_W.tolist())}
    if len(owners) < len(saved_W):
        return ""
    sources: dict[int, list[int]] = {}
    for rank in ranks:
        owner = owners.get(int(now_W[rank]))
        if owner is None:
            return ""
        sources.setdefault(owner, []).append(rank)
    parts = [
        f"{name_ranks(own)} hold{'s' if len(own) == 1 else ''} rank {owner}'s"
        for owner, own in sources.items()
    ]
    return listed(parts)

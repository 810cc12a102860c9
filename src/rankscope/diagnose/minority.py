"""Which workers are odd: the minority among those that should agree."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from rankscope.diagnose.rules import name_ranks

_T = TypeVar("_T", bound=Hashable)

_MOST_GROUPS = 4


def odd_ranks(values: Sequence[Hashable | None]) -> tuple[int, ...]:
    """Return the ranks whose value is not that of most; all known ones where no majority agrees.

    Args:
        values: One per rank; None where it is unknown, which is no difference.

    Returns:
        Ranks in order; nothing when all known values agree.
    """
    known = [rank for rank, value in enumerate(values) if value is not None]
    counts = Counter(values[rank] for rank in known)
    if len(counts) < 2:
        return ()
    common = _majority(counts)
    return tuple(rank for rank in known if common is None or values[rank] != common)


def name_values(values: Sequence[_T | None], word: Callable[[_T], str] = str) -> str:
    """Return who has what: ``0.3 on rank 3, 0.1 on the others``.

    Args:
        values: One per rank; None where it is unknown.
        word: Turns a value into words.
    """
    ranks: dict[_T, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            ranks.setdefault(value, []).append(rank)
    common = _majority(Counter({value: len(own) for value, own in ranks.items()}))
    rest = [value for value in ranks if value != common]
    parts = [f"{word(value)} on {name_ranks(ranks[value])}" for value in rest[:_MOST_GROUPS]]
    if len(rest) > _MOST_GROUPS:
        parts.append(f"other values on {len(rest) - _MOST_GROUPS} more")
    if common is not None:
        parts.append(f"{word(common)} on the others")
    return ", ".join(parts)


def _majority(counts: "Counter[_T]") -> _T | None:
    """Return the value that more than half of all have, None without one."""
    if not counts:
        return None
    value, most = counts.most_common(1)[0]
    return value if 2 * most > counts.total() else None

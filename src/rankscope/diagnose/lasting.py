"""On whom a fault is, the minority among those that should agree, and how long it has lasted."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rankscope.core.finding import Severity
from rankscope.core.replicas import majority
from rankscope.core.state import Stateful
from rankscope.diagnose.evidence import Evidence
from rankscope.diagnose.rules import name_ranks

HEALED_AFTER = 16
"""Steps without a trace of it, one after the other, after which a fault has healed."""


class Lasting(Stateful):
    """Follows one kind of fault through the steps that could show it.

    Args:
        needed: Steps that have to show it on the same worker before it is told.
        in_a_row: Whether these steps have to follow each other.

    Attributes:
        open: Whether it is there: told, and not healed since.
        ranks: The workers on which it was there at some time.
        first: The first step that showed it; -1 before.
        last: The last step that showed it; -1 before.
        count: Steps that showed it on enough workers to be told.
    """

    SETTINGS = ("_needed", "_in_a_row")

    def __init__(self, needed: int = 1, *, in_a_row: bool = False) -> None:
        self._needed = needed
        self._in_a_row = in_a_row
        self._shown: dict[int, tuple[int, int]] = {}
        self._quiet = 0
        self.open = False
        self.ranks: set[int] = set()
        self.first = -1
        self.last = -1
        self.count = 0

    def observe(self, step: int, ranks: Iterable[int]) -> bool:
        """Take one step that could show the fault.

        Args:
            step: Its number.
            ranks: The workers on which it shows it.

        Returns:
            Whether there is something to tell: the step shows the fault, or it has healed.
        """
        now = set(ranks)
        if self._in_a_row and self._shown:
            self._shown = {rank: self._shown[rank] for rank in now if rank in self._shown}
        if now:
            for rank in now:
                first, count = self._shown.get(rank, (step, 0))
                self._shown[rank] = first, count + 1
            certain = {rank for rank in now if self._shown[rank][1] >= self._needed}
            if certain:
                self._show(step, certain)
                return True
        self._quiet = 0 if now else self._quiet + 1
        if self._quiet >= HEALED_AFTER:
            self._shown = {}
            healed, self.open = self.open, False
            return healed
        return False

    def evidence(
        self,
        cause: str,
        severity: Severity,
        fields: Mapping[str, object] | None = None,
        numbers: Mapping[str, object] | None = None,
        *,
        key: str = "",
        ranks: tuple[int, ...] | None = None,
    ) -> Evidence:
        """Return what is known; ``ranks`` are those concerned, if not all that showed the fault."""
        return Evidence(
            cause=cause,
            severity=severity,
            ranks=tuple(sorted(self.ranks)) if ranks is None else ranks,
            first_step=self.first,
            last_step=self.last,
            count=self.count,
            fields=fields or {},
            numbers={"steps": self.count, **(numbers or {})},
            key=key,
            status="open" if self.open else "closed",
        )

    def _show(self, step: int, ranks: set[int]) -> None:
        if self.count == 0:
            self.first = min(self._shown[rank][0] for rank in ranks)
            self.count = max(self._shown[rank][1] for rank in ranks) - 1
        self.ranks |= ranks
        self.last = step
        self.count += 1
        self._quiet = 0
        self.open = True


_T = TypeVar("_T", bound=Hashable)

_MOST_GROUPS = 4


def known_values(values_W: NDArray[Any], known_W: NDArray[np.bool_]) -> list[Any]:
    """Return values of the workers as a list, None where one is unknown."""
    return [v if known else None for v, known in zip(values_W.tolist(), known_W, strict=True)]


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
    common = majority(Counter({value: len(own) for value, own in ranks.items()}))
    rest = [value for value in ranks if value != common]
    parts = [f"{word(value)} on {name_ranks(ranks[value])}" for value in rest[:_MOST_GROUPS]]
    if len(rest) > _MOST_GROUPS:
        parts.append(f"other values on {len(rest) - _MOST_GROUPS} more")
    if common is not None:
        parts.append(f"{word(common)} on the others")
    return ", ".join(parts)

"""On whom a fault is, the minority among those that should agree, and how long it has lasted."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.words import name_ranks
from rankscope.core.finding import Severity
from rankscope.core.replicas import majority
from rankscope.core.state import Stateful
from rankscope.diagnose.evidence import Evidence

_T = TypeVar("_T", bound=Hashable)

_MOST_GROUPS = 4

HEALED_AFTER = 16
"""Steps without a trace of it, one after the other, after which a fault has healed."""


class Span(Stateful):
    """The steps that showed a fault.

    Attributes:
        open: Whether it is still there, as far as is known.
        first: The first step that showed it; -1 before.
        last: The last step that showed it; -1 before.
        count: How many steps showed it.
    """

    def __init__(self) -> None:
        self.open = True
        self.first = self.last = -1
        self.count = 0

    def see(self, step: int, *, first: int | None = None, before: int = 0) -> None:
        """Take a step that shows it.

        Args:
            step: Its number.
            first: If nothing was told before, the first step that showed it; this one by default.
            before: And how many steps did before this one.
        """
        if not self.count:
            self.first, self.count = step if first is None else first, before
        self.last = step
        self.count += 1

    def evidence(
        self,
        cause: str,
        severity: Severity,
        ranks: Iterable[int] = (),
        fields: Mapping[str, object] | None = None,
        numbers: Mapping[str, object] | None = None,
        *,
        key: str = "",
    ) -> Evidence:
        """Return what is known of the fault as evidence."""
        return Evidence(
            cause=cause,
            severity=severity,
            ranks=tuple(sorted(ranks)),
            first_step=self.first,
            last_step=self.last,
            count=self.count,
            fields=fields or {},
            numbers=numbers or {},
            key=key,
            status="open" if self.open else "closed",
        )


class Lasting(Span):
    """Follows one kind of fault through the steps that could show it.

    Args:
        needed: Steps that have to show it on the same worker before it is told.
        in_a_row: Whether these steps have to follow each other.

    Attributes:
        open: Whether it is there: told, and not healed since.
        ranks: The workers on which it was there at some time.
        count: Steps that showed it on enough workers to be told.
    """

    SETTINGS = ("_needed", "_in_a_row")

    def __init__(self, needed: int = 1, *, in_a_row: bool = False) -> None:
        self._needed = needed
        self._in_a_row = in_a_row
        self._shown: dict[int, tuple[int, int]] = {}
        self._quiet = 0
        super().__init__()
        self.open = False
        self.ranks: set[int] = set()

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

    def _show(self, step: int, ranks: set[int]) -> None:
        first = min(self._shown[rank][0] for rank in ranks)
        self.see(step, first=first, before=max(self._shown[rank][1] for rank in ranks) - 1)
        self.ranks |= ranks
        self._quiet = 0
        self.open = True


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

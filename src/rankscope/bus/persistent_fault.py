"""The life of a fault: when it opens, which steps show it, and when it heals."""

from collections.abc import Iterable, Mapping
from typing import ClassVar

from rankscope.bus.detector import FaultEvidence
from rankscope.bus.finding import Severity
from rankscope.stats.state import Stateful

HEALED_AFTER = 16
"""Steps without a trace of it, one after the other, after which a fault has healed."""


class PersistentFault(Stateful):
    """One kind of fault over the run.

    Args:
        needed: Steps that have to show it on the same worker before it opens, see :meth:`observe`.
        in_a_row: Whether these steps have to follow each other.

    Attributes:
        open: Whether it has opened and not healed since.
        first: The first step that showed it; -1 before.
        last: The last step that showed it; -1 before.
        count: Number of steps that showed it.
        ranks: All workers that showed it at some time, as far as they were named.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ("_needed", "_in_a_row")

    def __init__(self, needed: int = 1, *, in_a_row: bool = False) -> None:
        self._needed = needed
        self._in_a_row = in_a_row
        self._shown: dict[int, tuple[int, int]] = {}
        self._quiet = 0
        self.open = False
        self.first = -1
        self.last = -1
        self.count = 0
        self.ranks: set[int] = set()

    def see(
        self, step: int, ranks: Iterable[int] = (), *, first: int | None = None, before: int = 0
    ) -> None:
        """Add a step that shows the fault, and open it without waiting for more.

        Args:
            step: Its number.
            ranks: The workers that show it.
            first: For the first call: the first step that showed it; this one by default.
            before: For the first call: number of earlier steps that showed it.
        """
        if not self.count:
            self.first = step if first is None else first
            self.count = before
        self.last = step
        self.count += 1
        self.ranks.update(ranks)
        self.open = True

    def observe(self, step: int, ranks: Iterable[int]) -> bool:
        """Add a step that ``ranks`` show the fault in, if any.

        Returns whether enough steps show it, this one among them, or it has just healed.
        """
        now = set(ranks)
        if self._in_a_row and self._shown:
            self._shown = {rank: self._shown[rank] for rank in now if rank in self._shown}
        for rank in now:
            first, count = self._shown.get(rank, (step, 0))
            self._shown[rank] = first, count + 1
        certain = {rank for rank in now if self._shown[rank][1] >= self._needed}
        if certain:
            first = min(self._shown[rank][0] for rank in certain)
            before = max(self._shown[rank][1] for rank in certain) - 1
            self.see(step, certain, first=first, before=before)
            self._quiet = 0
            return True
        self._quiet = 0 if now else self._quiet + 1
        if self._quiet < HEALED_AFTER:
            return False
        self._shown = {}
        return self.close()

    def close(self) -> bool:
        """Close the fault; return whether it was open."""
        was_open = self.open
        self.open = False
        return was_open

    def evidence(
        self,
        cause: str,
        severity: Severity,
        ranks: Iterable[int] = (),
        fields: Mapping[str, object] | None = None,
        numbers: Mapping[str, object] | None = None,
        *,
        key: str = "",
    ) -> FaultEvidence:
        """Return the fault as evidence."""
        return FaultEvidence(
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

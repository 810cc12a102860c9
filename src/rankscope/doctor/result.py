"""What a check of the preflight says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Facts = Mapping[str, Any]
"""What one worker saw of a check: plain JSON values, keys are strings."""


class Status(StrEnum):
    """How a check ended, mildest first."""

    SKIPPED = "skipped"
    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    @property
    def level(self) -> int:
        """Its place among all statuses: an error is the highest."""
        return list(Status).index(self)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the preflight's table.

    Attributes:
        name: Stable name, such as ``collectives``.
        title: What was checked, in a few words.
        status: How it ended.
        found: What was found, in a sentence.
        advice: What to do about it; empty when there is nothing to do.
        numbers: The numbers behind it, as plain JSON values.
        ranks: The ranks concerned; empty when it concerns all alike.
    """

    name: str
    title: str
    status: Status
    found: str
    advice: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the result as the command's JSON document holds it."""
        return {
            "name": self.name,
            "title": self.title,
            "status": str(self.status),
            "found": self.found,
            "advice": self.advice,
            "ranks": list(self.ranks),
            "numbers": dict(self.numbers),
        }


def worst(results: Sequence[CheckResult]) -> Status:
    """Return the gravest status of all; ``OK`` when nothing was worse."""
    return max((result.status for result in results), key=lambda s: s.level, default=Status.OK)


def unlike_most(values: Sequence[object]) -> tuple[int, ...]:
    """Return the ranks whose value is not that of the majority; all of them without one.

    Args:
        values: One value per rank, which can be hashed.
    """
    counts: dict[object, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    usual, number = max(counts.items(), key=lambda item: item[1])
    if number == len(values):
        return ()
    if 2 * number <= len(values):
        return tuple(range(len(values)))
    return tuple(rank for rank, value in enumerate(values) if value != usual)

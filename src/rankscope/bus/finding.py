"""A finding: a statement about a run, with its evidence."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

MAX_WORKERS = 2**20
"""Largest number of workers in a valid record."""


TIMES_LATELY = "times_in_50_steps"
"""Evidence of findings that come and go: in how many of the last steps they came."""

LATELY = 50
"""Steps that count for it."""

OFTEN = 3
"""Times from which such a finding is taken seriously."""


class Severity(IntEnum):
    """How bad a finding is; comparable: ``Severity.NOTE < Severity.WARNING``."""

    NOTE = 1
    WARNING = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


_ORDER = (
    *("id", "status", "step", "cause", "severity", "ranks", "groups", "first_step", "last_step"),
    *("evidence", "explanation", "next_check"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A statement about a run with its evidence, cause, and the next thing to check.

    Attributes:
        id: Stable inside a run; a later event with the same id replaces the earlier one.
        cause: Stable name of the probable cause, such as ``data.duplicate_batches``.
        severity: How bad it is.
        ranks: The workers concerned; empty when it concerns the run as a whole.
        first_step: The first step that shows it.
        last_step: The last step that showed it so far.
        explanation: What happens, in one or two sentences.
        next_check: What to look at next, in one sentence.
        evidence: Numbers behind the statement, by name.
        groups: Parameter groups concerned; empty when none in particular.
        status: ``open`` or ``closed``.
        step: The step at which this event was written.
    """

    id: str
    cause: str
    severity: Severity
    ranks: tuple[int, ...]
    first_step: int
    last_step: int
    explanation: str
    next_check: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    status: str = "open"
    step: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the event as ``findings.jsonl`` holds it: plain JSON values."""
        plain = {name: getattr(self, name) for name in _ORDER}
        return {
            **plain,
            "severity": str(self.severity),
            "ranks": list(self.ranks),
            "groups": list(self.groups),
            "evidence": dict(self.evidence),
        }

    @classmethod
    def from_json(cls, event: Mapping[str, Any]) -> "Finding":
        """Read an event of ``findings.jsonl``.

        Raises:
            KeyError: A required field is missing, or the severity has no such name.
            TypeError: A field is of another type.
            ValueError: A number is out of range.
        """
        if not isinstance(event, Mapping):
            raise TypeError(f"expected an object, got {type(event).__name__}")
        evidence = event.get("evidence", {})
        groups = event.get("groups", ())
        if not isinstance(evidence, Mapping) or not isinstance(groups, list | tuple):
            raise TypeError("evidence is an object, and groups is a list")
        if not all(isinstance(group, str) for group in groups):
            raise TypeError("groups is a list of names")
        return cls(
            id=str(event["id"]),
            cause=str(event["cause"]),
            severity=Severity[str(event["severity"]).upper()],
            ranks=tuple(_whole(rank, MAX_WORKERS) for rank in event["ranks"]),
            first_step=_whole(event["first_step"]),
            last_step=_whole(event["last_step"]),
            explanation=str(event["explanation"]),
            next_check=str(event["next_check"]),
            evidence=dict(evidence),
            groups=tuple(groups),
            status=str(event.get("status", "open")),
            step=_whole(event.get("step", 0)),
        )


def _whole(value: Any, end: int = 2**53) -> int:
    """Return a whole number from -1 to below ``end``."""
    if not isinstance(value, int | float) or value != int(value):
        raise TypeError(f"expected a whole number, got {value!r:.40}")
    if not -1 <= value < end:
        raise ValueError(f"expected a number below {end}, got {value!r:.40}")
    return int(value)

"""A finding: a statement about a run, with its evidence."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


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
        """
        return cls(
            id=str(event["id"]),
            cause=str(event["cause"]),
            severity=Severity[str(event["severity"]).upper()],
            ranks=tuple(int(rank) for rank in event["ranks"]),
            first_step=int(event["first_step"]),
            last_step=int(event["last_step"]),
            explanation=str(event["explanation"]),
            next_check=str(event["next_check"]),
            evidence=dict(event.get("evidence", {})),
            groups=tuple(event.get("groups", ())),
            status=str(event.get("status", "open")),
            step=int(event.get("step", 0)),
        )

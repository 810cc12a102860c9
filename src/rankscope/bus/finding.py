"""A finding: a statement about a run, with its evidence; and which of its updates are events."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from operator import attrgetter
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

    @classmethod
    def _missing_(cls, value: object) -> "Severity | None":
        """Return the member of a name in JSON, such as ``"error"``."""
        return next((each for each in cls if str(each) == value), None)


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


class FindingEvent(StrEnum):
    """The change that an update makes to a finding."""

    OPENED = "opened"
    """It opens, for the first time or again."""
    WORSE = "got worse"
    """It is more severe than ever since it opened."""
    CLOSED = "closed"
    """It has healed."""
    CHANGED = "changed"
    """Its cause, ranks or groups are others, or it is less severe."""
    GREW = "grew"
    """Its evidence has doubled since the last event."""

    @property
    def is_news(self) -> bool:
        """Whether users are notified at once."""
        return self in (FindingEvent.OPENED, FindingEvent.WORSE, FindingEvent.CLOSED)


@dataclass(frozen=True, slots=True)
class _Reported:
    """A finding at its last event, its worst severity since it opened, and its count."""

    finding: Finding
    worst: Severity
    count: int


class FindingEvents:
    """Follows findings from event to event.

    Findings open from ``severity`` on; ``known`` are those of an earlier run that this one
    continues.

    Example:
        >>> copies = Finding("copies", "data", Severity.WARNING, (0, 2), 5, 8, "So.", "Look.")
        >>> events = FindingEvents()
        >>> events.of(copies, count=3), events.of(copies, count=5), events.of(copies, count=6)
        (<FindingEvent.OPENED: 'opened'>, None, <FindingEvent.GREW: 'grew'>)
    """

    def __init__(self, known: Iterable[Finding] = (), severity: Severity = Severity.NOTE) -> None:
        self._severity = severity
        self._reported = {f.id: _Reported(f, f.severity, 0) for f in known}

    @property
    def reported(self) -> list[tuple[Finding, int]]:
        """All findings as they were at their last event, and the count of each."""
        return [(each.finding, each.count) for each in self._reported.values()]

    def of(self, finding: Finding, count: int = 0) -> FindingEvent | None:
        """Return the event that an update makes, None if only numbers have changed."""
        before = self._reported.get(finding.id)
        event = self._event(finding, before, count)
        if event is not None:
            was_open = before is not None and before.finding.status == "open"
            worst = max(finding.severity, before.worst if before and was_open else finding.severity)
            self._reported[finding.id] = _Reported(finding, worst, count)
        return event

    def note(self, finding: Finding, count: int) -> None:
        """Record a finding as reported, without an event."""
        self._reported[finding.id] = _Reported(finding, finding.severity, count)

    def _event(self, finding: Finding, before: _Reported | None, count: int) -> FindingEvent | None:
        was_open = before is not None and before.finding.status == "open"
        was_bad = was_open and before is not None and before.worst >= self._severity
        if finding.status != "open":
            if was_bad:
                return FindingEvent.CLOSED
        elif finding.severity >= self._severity:
            if not was_bad:
                return FindingEvent.OPENED
            if before is not None and finding.severity > before.worst:
                return FindingEvent.WORSE
        if before is None or _character(finding) != _character(before.finding):
            return FindingEvent.CHANGED
        return FindingEvent.GREW if count and count >= 2 * before.count else None


_character = attrgetter("status", "cause", "severity", "ranks", "groups")  # a change is an event

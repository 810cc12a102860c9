"""Which updates of a finding are events, and which events users are notified of.

Detectors update a finding often. The record takes every event; the log, the user's function and
the sinks only those that are news.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from rankscope.bus.finding import Finding, Severity


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

    Args:
        known: Findings that were reported before, in an earlier run that this one continues.
        severity: Least severity at which a finding opens.

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
        """Return the event that an update makes, None if only numbers have changed.

        ``count`` is the amount of evidence; 0 if unknown.
        """
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


def _character(finding: Finding) -> tuple[object, ...]:
    """Return the fields whose change is an event."""
    return finding.status, finding.cause, finding.severity, finding.ranks, finding.groups

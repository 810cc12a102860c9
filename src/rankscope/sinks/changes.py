"""What is news about a finding: that it opened, got worse, or closed."""

from collections.abc import Iterable
from enum import StrEnum

from rankscope.core.finding import Finding, Severity


class Change(StrEnum):
    """What happened to a finding."""

    OPENED = "opened"
    WORSE = "got worse"
    CLOSED = "closed"


class Changes:
    """Tells news from repetition: findings are told again whenever their evidence grows.

    Args:
        known: Findings that are no news.
        severity: Findings that never were this bad are no news either.
    """

    def __init__(self, known: Iterable[Finding] = (), severity: Severity = Severity.NOTE) -> None:
        self._severity = severity
        self._worst = {f.id: f.severity for f in known if f.status == "open"}

    def of(self, finding: Finding) -> Change | None:
        """Return what is new about a finding since it was last given; None if nothing is."""
        before = self._worst.get(finding.id)
        told = before is not None and before >= self._severity
        if finding.status != "open":
            self._worst.pop(finding.id, None)
            return Change.CLOSED if told else None
        self._worst[finding.id] = (
            finding.severity if before is None else max(before, finding.severity)
        )
        if finding.severity < self._severity:
            return None
        if not told:
            return Change.OPENED
        return Change.WORSE if before is not None and finding.severity > before else None


def sentence(finding: Finding, change: Change | None = None) -> str:
    """Return a finding in one paragraph of plain text.

    Args:
        finding: What to tell.
        change: What is new about it; its status, if None.
    """
    where = f" on rank {', '.join(map(str, finding.ranks[:8]))}" if finding.ranks else ""
    if len(finding.ranks) > 8:
        where += f" and {len(finding.ranks) - 8} more"
    return (
        f"{finding.severity}: {finding.cause} {change or finding.status}{where} "
        f"(steps {finding.first_step} to {finding.last_step}). {finding.explanation} "
        f"Next: {finding.next_check}"
    )

"""What runs of real ranks found."""

from rankscope import Finding, Run, Severity
from rankscope.verdict.diagnosis import diagnose_run


def told(run: Run, *kinds: str) -> dict[str, Finding]:
    """Return findings whose causes begin in these ways, by id: live ones, as from the record."""
    findings = {f.id: f for f in run.findings() if f.cause.startswith(kinds)}
    assert {f.id: f for f in diagnose_run(run) if f.id in findings} == findings
    return findings


def faults(run: Run) -> dict[str, Finding]:
    """Return all findings above a note, by id."""
    return {f.id: f for f in run.findings() if f.severity > Severity.NOTE}

"""What runs of real ranks found."""

import json

from rankscope import Severity
from rankscope.verdict.diagnosis import diagnose_run


def told(run, *kinds):
    """Return findings whose causes begin in these ways, by id: live ones, as from the record."""
    findings = {f.id: f for f in run.findings() if f.cause.startswith(kinds)}
    assert {f.id: f for f in diagnose_run(run) if f.id in findings} == findings
    return findings


def events_of(run_dir):
    file = run_dir / "findings.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def faults(run):
    return {f.id: f for f in run.findings() if f.severity > Severity.NOTE}

"""Scores: what counts as detected, which worker and cause are named, and what is a false alarm."""

import json
import re
from pathlib import Path

from benchmarks.faults.bench import Score, score
from benchmarks.faults.catalogue import catalogue
from benchmarks.faults.job import Trial
from benchmarks.faults.pool import Outcome
from benchmarks.faults.summary import markdown

from rankscope import Finding, Severity
from record.run_files import make_finding, write
from record.step_reports import make_report

DOCS = Path(__file__).parents[2] / "docs"
T4, D5, D20, H1 = (catalogue()[name] for name in ("T4", "D5", "D20", "H1"))


def finding(step: int, severity: Severity = Severity.ERROR) -> Finding:
    name = "state.hyperparameters_differ"
    return make_finding(
        name, cause=name, severity=severity, ranks=(1,), first_step=step, last_step=step, step=step
    )


def scored(tmp_path: Path, fault, *findings: Finding, problem: str = "") -> Score:
    run_dir = tmp_path / "run"
    run = write(run_dir, [make_report(step, 4) for step in range(30)])
    run.add_findings(findings)
    run.close("complete")
    trial = Trial(fault.id, 4, 0, 100, 20, run_dir)
    return score(fault, trial, Outcome((run_dir,), problem, 1.0))


def test_a_fault_that_is_found_as_expected(tmp_path):
    got = scored(tmp_path, T4, finding(23))
    assert (got.detected, got.delay, got.rank_named, got.cause_rank) == (True, 3, True, 1)
    assert got.false_alarms == ()
    assert got.as_expected


def test_a_healthy_look_alike_may_raise_notes_only(tmp_path):
    assert scored(tmp_path / "a", H1, finding(5, severity=Severity.NOTE)).as_expected
    alarmed = scored(tmp_path / "b", H1, finding(5, severity=Severity.WARNING))
    assert alarmed.false_alarms == ("state.hyperparameters_differ",)
    assert not alarmed.as_expected


def test_the_page_of_the_docs_is_of_the_stored_scores():
    stored = json.loads((DOCS / "fault-bench.json").read_text())
    page = (DOCS / "fault-bench.md").read_text()
    command = re.search(r"Written by `(.*?)`", page)[1]
    planned = re.search(r"of ([\d,]+) runs are still", page)
    number = int(planned[1].replace(",", "")) if planned else len(stored)
    scores = [Score.from_json(one, catalogue()) for one in stored]
    rendered = markdown(scores, list(catalogue().values()), command, number)
    assert of_any_machine(rendered) == of_any_machine(page)


def of_any_machine(page):
    return [line for line in page.splitlines() if not line.startswith("Workers: ")]

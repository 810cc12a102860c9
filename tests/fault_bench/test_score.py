"""Scores: what counts as detected, which worker and cause are named, and what is a false alarm."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.faults.bench import Score, score
from benchmarks.faults.catalogue import catalogue
from benchmarks.faults.job import Trial
from benchmarks.faults.pool import Outcome
from benchmarks.faults.summary import markdown, shares

from rankscope import Finding, Severity
from record.run_files import write
from record.step_reports import make_report

DOCS = Path(__file__).parents[2] / "docs"
T4, D5, D20, H1 = (catalogue()[name] for name in ("T4", "D5", "D20", "H1"))


def finding(step: int, **changes: object) -> Finding:
    one = Finding(
        id="state.hyperparameters_differ",
        cause="state.hyperparameters_differ",
        severity=Severity.ERROR,
        ranks=(1,),
        first_step=step,
        last_step=step,
        explanation="",
        next_check="",
        step=step,
    )
    return replace(one, **changes)  # type: ignore[arg-type]


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


def test_an_alarm_before_the_fault_is_false(tmp_path):
    got = scored(tmp_path, T4, finding(5, id="early", cause="data.worker_outlier"), finding(25))
    assert got.false_alarms == ("data.worker_outlier",)
    assert got.detected
    assert not got.as_expected


@pytest.mark.parametrize("ranks", [(0, 1)])
def test_other_workers_are_not_the_worker(tmp_path, ranks):
    got = scored(tmp_path, T4, finding(23, ranks=ranks))
    assert not got.rank_named
    assert not got.as_expected


def test_the_second_cause_suffices_for_a_statistical_fault_only(tmp_path):
    first = finding(30, id="other", cause="inconclusive")
    second = finding(40, id="own", cause="data.worker_outlier", severity=Severity.WARNING)
    got = scored(tmp_path, D20, first, second)
    assert got.cause_rank == 2
    assert got.as_expected
    assert not replace(got, fault=replace(T4, causes=D20.causes)).as_expected


def test_a_healthy_look_alike_may_raise_notes_only(tmp_path):
    assert scored(tmp_path / "a", H1, finding(5, severity=Severity.NOTE)).as_expected
    alarmed = scored(tmp_path / "b", H1, finding(5, severity=Severity.WARNING))
    assert alarmed.false_alarms == ("state.hyperparameters_differ",)
    assert not alarmed.as_expected


def test_the_page_shows_every_fault_and_judges_the_goals(tmp_path):
    good = scored(tmp_path / "a", T4, finding(23))
    bad = scored(tmp_path / "b", H1, finding(5, severity=Severity.WARNING))
    page = markdown([good, bad], list(catalogue().values()), "faults --all", 2)
    assert page.startswith("# The fault bench\n")
    for fault in catalogue().values():
        assert f"| {fault.id} | {fault.mechanism} |" in page
    assert "| Exact faults: detected | 1 | 100% | ≥ 99% |" in page
    assert "| Healthy look-alikes: notes only | 1 | 0% | all, **missed** |" in page
    assert "`faults --all`" in page
    by_name = {share.what: share for share in shares([good, bad])}
    assert by_name["Exact faults: worker named"].reached
    assert not by_name["Healthy look-alikes: notes only"].reached


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

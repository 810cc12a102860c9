"""The runs of one job share a verdict; those of another job beside them do not count."""

import dataclasses

import pytest
from typer.testing import CliRunner

from rankscope.bus.finding import Severity
from rankscope.cli.main import app
from rankscope.record import Run, RunWriter
from rankscope.report.live.catalog import ListedPlace, glance, stamp
from rankscope.verdict.assessment import assess, coordinate_of, siblings_of
from rankscope.verdict.coverage import MeasuredParts
from rankscope.verdict.news import Announcer
from record.run_files import make_finding, make_report

WARNING = Severity.WARNING


def write(path, ranks, findings=(), job="a", base="sft", name=""):
    told = {"id": job, "base": base, "name": name or path.name, "ranks": list(ranks)}
    run = RunWriter(path, {"num_workers": 2, **({"job": told} if job else {})})
    run.add(make_report(0))
    run.add_findings(findings)
    run.close("complete")


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "sft", (0, 1))
    write(tmp_path / "sft-from-rank-2", (2, 3), [make_finding()])
    write(tmp_path / "sft-from-rank-4", (4, 5))
    write(tmp_path / "sft-from-rank-6", (6, 7), [make_finding()], job="b")
    write(tmp_path / "sft-2", (0, 1), [make_finding()], name="sft")  # a later attempt
    write(tmp_path / "sft2", (0, 1), [make_finding()], job="")
    return tmp_path


def test_a_run_without_a_fault_shows_its_siblings(folder):
    found = assess(Run.open(folder / "sft"))
    assert found.word == str(make_finding().severity)
    assert found.headline.startswith("Among ranks 2 and 3 of this job: ")
    assert "sft-from-rank-4 (ranks 4 and 5): no fault found" in found.statements[0]
    assert found.statements[0].endswith("are ranks 0 and 1 of the job.")
    assert "of this job" not in assess(Run.open(folder / "sft-from-rank-2")).headline


def test_the_list_shows_the_worst_of_a_job_as_the_report_does(folder):
    for name in ("sft", "sft-from-rank-2", "sft-from-rank-4", "sft-from-rank-6"):
        place = ListedPlace(name, folder / name, name)
        listed = glance(place, stamp(place, folder))
        assert listed.severity == assess(Run.open(folder / name)).word
        assert listed.headline.startswith("Among ranks 2 and 3 of this job: ") is (
            name in ("sft", "sft-from-rank-4")
        )


def test_the_list_shows_the_worst_of_a_run_also_where_it_follows_from_a_warning(tmp_path):
    cause = make_finding("compute.modes_differ", cause="compute.modes_differ", severity=WARNING)
    write(tmp_path / "run", (0, 1), [make_finding("canary-code"), cause], job="")
    place = ListedPlace("run", tmp_path / "run", "run")
    listed = glance(place, stamp(place, tmp_path))
    assert listed.severity == assess(Run.open(tmp_path / "run")).word == "error"
    assert listed.headline == "Modules are in training mode on some workers only"


def test_exit_codes_count_siblings(folder):
    for name in ("sft", "sft-from-rank-4", "sft-from-rank-2"):
        words = ["report", str(folder / name), "--no-html", "--fail-on", "warning"]
        assert CliRunner().invoke(app, words).exit_code == 1


def test_lines_have_the_place_in_the_job_and_the_worst_of_its_runs(folder):
    lines = []
    run = Run.open(folder / "sft")
    announcer = Announcer(lambda line, is_fault: lines.append(line), coordinate_of(run.info))
    siblings, whole = siblings_of(run), MeasuredParts(30, 30, 30, 30)
    facts = {"num_steps": 30, "num_workers": 2, "options": None, "coverage": whole}
    announcer.conclude((), **facts, siblings=siblings)
    announcer.conclude((), **facts)
    late = [dataclasses.replace(siblings[0], status="running", findings=())]
    announcer.conclude((), **facts, siblings=late)
    start = "ranks 0 and 1: 30 steps of 2 workers: "
    assert lines[0].startswith(f"{start}Among ranks 2 and 3 of this job: ")
    assert lines[1].startswith(f"{start}no fault found")
    assert lines[2] == f"{lines[1]} 1 other run of this job: not yet judged."


def test_the_advice_begins_with_a_fault_of_another_run_that_began_before(tmp_path):
    first, later = (make_finding(first_step=step, last_step=9) for step in (0, 1))
    write(tmp_path / "sft", (0, 1), [later])
    write(tmp_path / "sft-from-rank-2", (2, 3), [first])
    behind, before = (assess(Run.open(path)) for path in sorted(tmp_path.iterdir()))
    assert behind.recommendation.startswith("Among ranks 2 and 3 of this job: ")
    assert f"See rankscope report {tmp_path / 'sft-from-rank-2'}." in behind.recommendation
    assert behind.recommendation.endswith(before.recommendation)
    assert behind.headline == before.headline


def test_a_command_can_be_pasted_in_any_directory(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert (
        f"rankscope report {folder / 'sft-from-rank-2'}." in assess(Run.open("sft")).recommendation
    )

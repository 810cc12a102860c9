import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from rankscope.agent.assembly import summarize
from rankscope.bus.finding import Finding, Severity
from rankscope.cli.main import app
from rankscope.cli.report import Listing, run_result
from rankscope.record import Run, RunWriter
from rankscope.report.live.catalog import ListedPlace, glance, stamp
from rankscope.report.study_words import Entry
from rankscope.verdict.assessment import assess, coordinate_of, siblings_of
from rankscope.verdict.coverage import MeasuredParts, coverage_of
from rankscope.verdict.news import Announcer
from rankscope.verdict.words import load
from record.run_files import make_finding
from record.step_reports import make_report
from support.streams import gathered

ALL = range(80)
SOME = Finding("toy", "toy", Severity.NOTE, (), 0, 1, "A note. It is one.", "Look.")


def record(
    path, *, measured=ALL, losses=ALL, interval=1, info=None, findings=(), drawn=4, alike=()
):
    rng = np.random.default_rng(0)
    writer = RunWriter(path, {"num_workers": 2, **(info or {})})
    for step in ALL:
        rows = rng.standard_normal((2, 60)).astype(np.float32)
        rows = rows[[0, 0]] if step in alike else rows
        batches = [np.arange(drawn) + 8 * step, np.arange(drawn) + 8 * step + 4]
        columns = {"loss": rng.gamma(4.0, 0.5, 2)} if step in losses else {}
        if step in measured:
            columns |= {"sketches_WK": rows, "grad_norm": np.linalg.norm(rows, axis=1)}
        one = gathered(step, batches, samples_named=[True, True], **columns)
        object.__setattr__(one, "interval", interval)
        writer.add(summarize(one))
    writer.add_findings(findings)
    writer.close()
    return Run.open(path)


def last_line(run):
    lines = []
    Announcer(lambda line, is_fault: lines.append(line)).conclude(
        run.findings(), num_steps=80, num_workers=2, options=None, coverage=coverage_of(run)
    )
    return lines[-1]


def test_everything_measured_is_healthy_and_has_no_limits(tmp_path):
    run = record(tmp_path / "run")
    found = assess(run)
    assert (found.word, coverage_of(run).limits) == ("healthy", "")
    assert not any(text.startswith("Measured:") for text in found.statements)
    assert any("in loss, gradient or amount of data" in text for text in found.statements)
    assert last_line(run) == "80 steps of 2 workers: no fault found."
    assert coverage_of(record(tmp_path / "half", alike=range(40))).severity is None
    reduced = coverage_of(record(tmp_path / "reduced", alike=range(41)))
    assert (reduced.severity, "no worker's own is known" in reduced.verdict) == (
        Severity.NOTE,
        True,
    )


def test_a_run_without_losses_is_healthy_and_learns_how_to_give_them(tmp_path):
    run = record(tmp_path / "run", losses=())
    found = assess(run)
    assert "A loss was recorded in none of 80 steps." in found.headline
    assert "call scope.loss(loss) before loss.backward()" in found.recommendation
    assert "Nothing to change" not in found.recommendation
    assert "scope.loss gives it where the loop computes it" in last_line(run)


def test_a_run_without_samples_says_so_and_how_to_name_them(tmp_path):
    run = record(tmp_path / "run", drawn=0)
    found = assess(run)
    assert "Samples were identified in no step." in found.headline
    assert "call scope.batch(ids)" in found.recommendation
    assert last_line(run).endswith(
        "but samples were identified in no step; scope.batch names them."
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"measured": (0,)}, "gradients were measured in 1 of 80 steps"),
        (
            {"measured": (), "losses": ()},
            "gradients were measured in none of 80 steps, a loss was recorded in none of 80 steps",
        ),
    ],
)
def test_no_face_calls_a_run_without_gradients_healthy(tmp_path, options, words):
    run = record(tmp_path / "run", findings=[SOME], **options)
    said = f"ot enough was measured to judge: {words}"
    found = load(tmp_path / "run").assess()
    assert found.headline == f"N{said}."
    assert found.severity is Severity.WARNING  # as of a run that recorded nothing
    assert not any("stands out" in t or "Checked" in t for t in found.statements)
    assert f"n{said}" in last_line(run)
    listed = Listing(tmp_path)
    assert listed.worst is Severity.WARNING
    [row] = listed.to_json()["runs"]
    assert (row["headline"], row["since_step"]) == (f"N{said}", None)
    as_json = json.loads(json.dumps(run_result(run)))
    assert (as_json["severity"], as_json["headline"]) == ("warning", f"N{said}.")
    assert Entry(as_json).severity == "warning"


@pytest.mark.parametrize(("steps", "word"), [(70, "note"), (10, "warning")])
def test_what_joins_late_costs_the_verdict_its_last_steps_alone(tmp_path, steps, word):
    training = {"parameters": {"tensors": 9, "trained_tensors": 2}, "optimizer": {"groups": []}}
    joined = {"step": steps, "steps": steps, "tensors": 7, "names": ["trunk.weight"]}
    found = assess(record(tmp_path / "run", info={"training": training, "joined": joined}))
    assert found.word == word
    words = "2 of the 9 trained tensors watched, without trunk.weight and 6 others, trained since"
    assert words in found.headline


def test_a_run_whose_agent_ended_before_its_first_step_says_so(tmp_path):
    for name, info in (("early", {"pid": 7, "ended": "exited with code 1"}), ("empty", {"pid": 7})):
        RunWriter(tmp_path / name, {"num_workers": 2, "agent": info}).close("incomplete")
    said = assess(Run.open(tmp_path / "early"))
    assert "the process that writes the run exited with code 1 before" in said.headline
    assert "RANKSCOPE_AGENT_LOG=FILE" in said.recommendation
    assert "before its first step had" in assess(Run.open(tmp_path / "empty")).headline
    rows = Listing(tmp_path).to_json()["runs"]
    assert all(row["verdict"] == "warning" for row in rows)
    assert all(row["headline"].startswith("Nothing was recorded: ") for row in rows)


def test_a_fault_is_the_verdict_however_little_was_measured(tmp_path):
    fault = Finding("toy", "toy", Severity.ERROR, (1,), 0, 1, "Rank 1 is off. Yes.", "Look.")
    run = record(tmp_path / "run", measured=(), findings=[fault])
    found = assess(run)
    assert (found.severity, found.headline) == (Severity.ERROR, "Rank 1 is off.")
    assert "Measured: gradients in 0 of the 80 steps in which they were due." in found.statements
    assert last_line(run) == "80 steps of 2 workers: 1 error. Rank 1 is off."


def test_steps_that_are_left_out_on_purpose_are_not_missing(tmp_path):
    run = record(tmp_path / "run", measured=range(0, 80, 8), interval=8)
    assert (coverage_of(run).due, coverage_of(run).gradients) == (10, 10)
    assert assess(run).word == "healthy"
    missed = record(tmp_path / "missed", measured=(0, 8, 16, 24), interval=8)
    assert "in 4 of 10 steps" in assess(missed).headline


@pytest.mark.parametrize(
    ("updated", "severity", "begins"),
    [(3, "note", "No fault found: "), (5, "warning", "Not enough was measured to judge: ")],
)
def test_a_model_that_is_watched_in_part_is_not_healthy(tmp_path, updated, severity, begins):
    optimizer = {"groups": [{"tensors": 2}, {"tensors": updated - 2}]}
    named = {"unwatched": ["Head.bias", "Head.weight"]}
    training = {"parameters": {"tensors": 2}, "optimizer": optimizer, **named}
    found = assess(record(tmp_path / "run", info={"training": training}))
    assert found.word == severity
    assert found.headline.startswith(begins)
    assert f"2 of the {updated} tensors of the optimizer" in found.headline
    assert "without Head.bias and Head.weight" in found.headline
    assert Listing(tmp_path).to_json()["runs"][0]["verdict"] == severity


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
    assert f"report {folder / 'sft-from-rank-2'}." in assess(Run.open("sft")).recommendation

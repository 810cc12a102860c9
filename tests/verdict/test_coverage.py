"""A verdict says no more than was measured, on every face that gives one."""

import json

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.finding import Finding, Severity
from rankscope.cli.report import Listing, run_result
from rankscope.record import Run, RunWriter
from rankscope.report.study_words import Entry
from rankscope.verdict.assessment import assess
from rankscope.verdict.coverage import coverage_of
from rankscope.verdict.news import Announcer
from rankscope.verdict.words import load
from support.streams import gathered

ALL = range(80)
SOME = Finding("toy", "toy", Severity.NOTE, (), 0, 1, "A note. It is one.", "Look.")


def record(path, *, measured=ALL, losses=ALL, interval=1, info=None, findings=(), drawn=4):
    """Record 80 steps of two workers, with gradients and losses in some of them."""
    rng = np.random.default_rng(0)
    writer = RunWriter(path, {"num_workers": 2, **(info or {})})
    for step in ALL:
        rows = rng.standard_normal((2, 60)).astype(np.float32)
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
    announcer = Announcer(lambda line, is_fault: lines.append(line))
    announcer.conclude(
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
    for name, agent in (
        ("early", {"pid": 7, "ended": "exited with code 1"}),
        ("empty", {"pid": 7}),
    ):
        writer = RunWriter(tmp_path / name, {"num_workers": 2, "agent": agent})
        writer.close("incomplete")
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
    run = record(tmp_path / "run", info={"training": training})
    found = assess(run)
    assert found.word == severity
    assert found.headline.startswith(begins)
    assert f"2 of the {updated} tensors of the optimizer" in found.headline
    assert "without Head.bias and Head.weight" in found.headline
    assert Listing(tmp_path).to_json()["runs"][0]["verdict"] == severity

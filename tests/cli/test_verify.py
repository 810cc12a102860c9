"""``rankscope verify`` on recorded runs."""

import json

import pytest
import typer
from typer.testing import CliRunner

from rankscope.bus.finding import Severity
from rankscope.cli.verify import verify
from rankscope.errors import RunError
from rankscope.record import RunWriter
from record.run_files import make_finding


def call(*arguments):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(verify)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def recorded(path, *causes):
    writer = RunWriter(path, {"num_workers": 2})
    notes = ("verify.agrees", "verify.declined", "update.agrees", "update.declined")
    severities = dict.fromkeys(notes, Severity.NOTE)
    writer.add_findings(
        make_finding(
            f"{cause}:{step}",
            cause=cause,
            severity=severities.get(cause, Severity.ERROR),
            explanation=f"The gradient of step {step}: {cause}.",
            step=step,
        )
        for step, cause in enumerate(causes)
    )
    writer.close("complete")
    return path


@pytest.mark.parametrize(
    ("causes", "answer", "code"),
    [
        (["verify.agrees", "data.duplicate_batches"], "right", 0),
        (["verify.agrees", "verify.declined"], "right", 0),
        (["verify.agrees", "verify.scale"], "wrong", 1),
        (["verify.declined", "verify.parameters"], "wrong", 1),
        (["verify.declined"], "unknown", 2),
        (["verify.agrees", "update.declined"], "right", 0),
        (["verify.agrees", "update.differs"], "wrong", 1),
        (["verify.declined", "update.agrees"], "unknown", 2),
        (["verify.agrees", "state.parameters_differ"], "wrong", 1),
        (["verify.agrees", "sync.not_reduced"], "wrong", 1),
    ],
)
def test_the_answer_and_the_code(tmp_path, causes, answer, code):
    path = recorded(tmp_path / "run", *causes)
    shown, as_json = call(path), call(path, "--json")
    assert shown.exit_code == as_json.exit_code == code
    assert [f"step {n}: {cause}" in shown.output for n, cause in enumerate(causes)] == [
        cause != "data.duplicate_batches" for cause in causes
    ]
    assert json.loads(as_json.output)["answer"] == answer


def test_a_run_without_a_reference_step_proves_nothing(tmp_path):
    ended = call(recorded(tmp_path / "run"))
    assert isinstance(ended.exception, RunError)
    assert "--verify-at 20" in str(ended.exception)

import json

import pytest

from rankscope.bus.finding import Severity
from rankscope.record import RunWriter
from record.run_files import make_finding


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
def test_the_answer_and_the_code(command, tmp_path, causes, answer, code):
    path = recorded(tmp_path / "run", *causes)
    shown_code, shown, _ = command("verify", path)
    json_code, as_json, _ = command("verify", path, "--json")
    assert shown_code == json_code == code
    for step, cause in enumerate(causes):
        assert (f"step {step}: {cause}" in shown) is (cause != "data.duplicate_batches")
    assert json.loads(as_json)["answer"] == answer


def test_a_run_without_a_reference_step_proves_nothing(command, tmp_path):
    code, _, err = command("verify", recorded(tmp_path / "run"))
    assert code == 2
    assert "--verify-at 20" in err

import subprocess
import sys
from importlib.metadata import version
from unittest import mock

import pytest
import typer

from rankscope.cli import main
from rankscope.errors import MissingExtraError, UsageError
from rankscope.lab.study.launch import StudyInterrupted, WorkerFailedError

FROZEN = {
    "": "--version --install-completion --show-completion",
    "parity": "-a -b -b2 --bisect --html --json --map --no-dropout --parallel --resume-at --run-dir"
    " --same-start --steps --timeout",
    "report": "--again --full --fail-on --format --html --json --no-html --output",
    "run": "-m --alert --every --groups --no-announce --no-canary --no-dropout --overhead-budget"
    " --parity --plan --reduced --run-dir --sink --tier --trace --verify-at",
    "study": "--accumulation --batch-size --data --json --learning-rate --limit --max-length"
    " --model --output --overwrite --precision --reading --resume --save-all --seed --settings"
    " --steps --weights --workers",
}


def options_of(command):
    found = typer.main.get_command(main.app)
    if command:
        found = found.commands[command]  # type: ignore[attr-defined]
    context = found.make_context("rankscope", [], resilient_parsing=True)
    parameters = found.get_params(context)
    return {
        name
        for parameter in parameters
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("-")
    }


@pytest.mark.parametrize("command", FROZEN)
def test_the_options_are_frozen(command):
    assert options_of(command) - {"--help", "-h"} == set(FROZEN[command].split())


def test_as_a_module():
    process = subprocess.run(
        [sys.executable, "-m", "rankscope", "--version"], capture_output=True, text=True, check=True
    )
    assert process.stdout == f"rankscope {version('rankscope')}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["studi"], "No such command 'studi'; did you mean 'study'? See rankscope --help"),
        (["study", "--stepz", "3"], "No such option: --stepz"),
        (["study", "--steps", "many"], "--steps expected a whole number, got 'many'; see"),
        (["study", "--reading", "both-of-them"], "Invalid value for '--reading'"),
        (["report"], "Missing argument"),
    ],
)
def test_a_command_line_that_cannot_be_read(command, words, message):
    code, out, err = command(*words)
    assert (code, out) == (2, "")
    assert err.startswith(f"rankscope: {message}")
    assert err.endswith("--help\n")
    assert len(err.splitlines()) == 1


@pytest.fixture
def failing(command, monkeypatch):

    def call(error):
        monkeypatch.setattr(main, "app", mock.Mock(side_effect=error))
        return command("report", "x")

    return call


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("[bold]a\nb[/]"), 2),
        (MissingExtraError("rankscope study", "study"), 2),
        (WorkerFailedError("x"), 3),
        (StudyInterrupted("x"), 130),
    ],
)
def test_errors_of_ours_are_one_plain_line_and_an_exit_code(failing, error, code):
    message = " ".join(str(error).split())
    assert failing(error) == (code, "", f"rankscope: {message}\n")


def test_ctrl_c_outside_a_study_is_quiet(failing):
    assert failing(KeyboardInterrupt) == (130, "", "")


def test_a_defect_is_one_line_and_a_code_of_its_own(failing):
    code, out, err = failing(AttributeError("no\nsuch thing"))
    assert (code, out) == (main.DEFECT, "")
    assert err.count("\n") == 1
    assert "AttributeError: no such thing (at " in err

import io
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import pytest
import typer

from rankscope.cli import main
from rankscope.errors import MissingExtraError, UsageError
from rankscope.lab.study.launch import StudyInterrupted, WorkerFailedError
from report.recorded_runs import record_run

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
    parameters = found.get_params(found.make_context("rankscope", [], resilient_parsing=True))
    names = {name for one in parameters for name in (*one.opts, *one.secondary_opts)}
    return {name for name in names if name.startswith("-")}


@pytest.mark.parametrize("command", FROZEN)
def test_the_options_are_frozen(command):
    assert options_of(command) - {"--help", "-h"} == set(FROZEN[command].split())


def test_as_a_module():
    command = [sys.executable, "-m", "rankscope", "--version"]
    assert subprocess.check_output(command, text=True) == f"rankscope {version('rankscope')}\n"


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


NUMBERS = ("numerics", "--synthetic", "normal", "--workers", "2", "--orders", "2")


@pytest.fixture(scope="module")
def recorded(folder):
    record_run(folder / "healthy", num_workers=2, num_steps=3)
    record_run(folder / "copied", reading="replicated", num_workers=2, num_steps=3)
    return folder


@pytest.fixture
def runs(recorded, tmp_path):
    return shutil.copytree(recorded, tmp_path / "runs")


@pytest.fixture
def call(monkeypatch):
    def run(stdout, *words):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            patch.setattr(sys, "argv", ["rankscope", *map(str, words)])
            with pytest.raises(SystemExit) as ended:
                main.run()
            assert sys.stdout is stdout
        assert isinstance(ended.value.code, int)
        return ended.value.code

    return run


@pytest.fixture
def closed():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as file:
        yield file


@pytest.fixture
def full():
    with Path("/dev/full").open("w", encoding="utf-8") as file:
        yield file


@pytest.mark.parametrize("how", [(), ("--json",)], ids=["verdict", "json"])
def test_a_reader_that_has_gone_changes_neither_code_nor_files(runs, call, closed, capsys, how):
    for name, code in (("healthy", 0), ("copied", 1)):
        assert call(closed, "report", runs / name, "--format", "md", *how) == code
        assert (runs / name / "report.md").read_text().startswith("## ")
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_has_gone_changes_nothing_in_other_commands(runs, call, closed, tmp_path):
    assert call(closed, "diff", runs / "healthy", runs / "copied") == 1
    assert call(closed, *NUMBERS, "--json", "--output", tmp_path / "numbers") == 0
    assert (tmp_path / "numbers" / "numerics.json").is_file()


def test_an_output_without_room_is_one_line_and_no_finding(runs, call, full, capsys):
    assert call(full, "report", runs / "copied", "--format", "md", "--json") == 2
    assert (runs / "copied" / "report.md").read_text().startswith("## ")
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("rankscope: cannot write to standard output (No space left on device)")


def test_what_an_encoding_lacks_becomes_the_nearest_sign_it_has(runs, call, tmp_path):
    written = {}
    for encoding in ("ascii", "utf-8"):
        with (tmp_path / encoding).open("w+", encoding=encoding) as file:
            assert call(file, "report", runs / "copied", "--no-html", "--full") == 1
            file.seek(0)
            written[encoding] = file.read()
    assert {"◆", "·"} <= set(written["utf-8"])
    assert "# ERROR  copied" in written["ascii"]
    assert "- On average" in written["ascii"]
    assert "?" not in written["ascii"]
    assert len(written["ascii"].splitlines()) == len(written["utf-8"].splitlines())


TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
FIRST = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("words", "environment", "told"),
    [
        (["report"], {"RANK": "1"}, True),
        (["run"], FIRST, True),
        (["run"], {**FIRST, "SLURM_PROCID": "1"}, True),
        (["run"], TORCHRUN, False),
        (["replay"], {"SLURM_PROCID": "2", "RANK": "2"}, False),
    ],
)
def test_bad_usage_is_told_unless_rank_0_tells_it(
    call, monkeypatch, capsys, words, environment, told
):
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    for name in (*main.LAUNCHED, *main.RANKS):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert call(io.StringIO(), *words) == 2
    assert capsys.readouterr().err.startswith("rankscope: ") is told
    assert waited == ([] if told else [main.PATIENCE])  # rank 0 speaks before a launcher ends it

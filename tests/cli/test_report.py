import errno
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from rankscope.cli.report import report
from rankscope.cli.verdict import SUMMARY_LINES, render_run, render_study
from rankscope.errors import RunError, UsageError
from rankscope.record import Run
from rankscope.verdict.assessment import assess
from report.recorded_runs import record_run, record_study, with_everything

HOSTILE = "[bold red]name[/]\x1b[2J\x1b]0;title\x07\r[link=http://x]y"


@pytest.fixture(scope="module")
def healthy(folder):
    return record_run(folder / "healthy", num_steps=64).path


@pytest.fixture(scope="module")
def copied(folder):
    place = folder / "copied"
    return record_run(place, reading="replicated", setting="s1-2", num_steps=6).path


@pytest.fixture(scope="module")
def study(folder):
    return record_study(folder / "study", num_steps=6)


def call(*arguments):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(report)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def shown(width, *, colour=False):
    file = io.StringIO()
    return Console(file=file, width=width, force_terminal=colour), file


def test_a_healthy_run(healthy):
    result = call(healthy)

    assert result.exit_code == 0
    assert "HEALTHY" in result.output
    assert "Nothing to change." in result.output
    assert "\x1b" not in result.output
    assert (healthy / "report.html").is_file()
    assert str(healthy / "report.html") in result.output


def test_a_read_only_directory_has_a_verdict_and_no_page(copied, tmp_path, monkeypatch):
    """As on an archive that is mounted read-only, which the tests' user cannot make."""
    (copied / "report.html").unlink(missing_ok=True)
    monkeypatch.setattr(os, "access", lambda path, mode, **_: mode != os.W_OK or path == tmp_path)
    result = call(copied)
    assert result.exit_code == 1
    assert "as its directory is read-only; name a file with --output" in result.output
    assert not (copied / "report.html").exists()
    assert call(copied, "--output", tmp_path / "page.html").exit_code == 1
    assert (tmp_path / "page.html").is_file()


def test_a_full_disk_leaves_the_verdict_and_its_exit_code(copied, tmp_path, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("rankscope.report.document.tempfile.mkstemp", full)
    result = call(copied)
    assert result.exit_code == 1
    assert "ERROR" in result.output
    assert f"cannot write {copied / 'report.html'}: No space left" in result.output
    assert "free some space" in result.output
    assert isinstance(call(copied, "--output", tmp_path / "page.html").exception, RunError)


def test_a_run_with_a_finding_shows_it_first_and_exits_with_1(copied):
    result = call(copied)

    assert result.exit_code == 1
    lines = [line.strip() for line in result.output.splitlines() if line.strip()]
    assert lines[0].startswith("◆ ERROR")
    text = " ".join(lines)
    assert "data.duplicate_batches" in text
    assert "ranks 1–7 · steps 0 to 5" in text
    assert "Check next:" not in text
    assert len(result.output.splitlines()) <= SUMMARY_LINES

    full = call(copied, "--full")
    assert full.exit_code == 1
    assert "Check next:" in full.output
    assert "What the measurements show" in full.output


def with_findings(run, place, *events):
    shutil.copytree(run, place)
    model = json.loads((run / "findings.jsonl").read_text().splitlines()[-1])
    lines = [json.dumps(model | event) + "\n" for event in events]
    (place / "findings.jsonl").write_text("".join(lines))
    return place


def test_the_summary_of_many_findings_has_twelve_lines(copied, tmp_path):
    causes = ["numerics.nonfinite", "loss.scale", "data.dispersion_too_high", "time.straggler"]
    events = [
        {"id": f"{cause}/{rank}", "cause": cause, "ranks": [rank], "severity": severity}
        for rank in range(8)
        for cause, severity in zip(causes, ["error", "warning", "note", "error"], strict=True)
    ]
    many = with_findings(copied, tmp_path / "many", *events)

    for columns in ("80", "120"):
        output = call_in(columns, many).output
        lines = output.splitlines()
        assert len(lines) <= SUMMARY_LINES
        assert lines[0].startswith("  ◆ ERROR")
        assert "What to do:" in output
        assert f"  More: rankscope report {many} --full" in lines
        (rest,) = [line for line in lines if re.match(r"  Also \d", line)]
        shown = sum(line.startswith(("  ◆ ", "  ▲ ")) for line in lines[1:])
        numbers = [int(word) for word in rest.replace(",", "").split() if word.isdigit()]
        assert shown >= 1
        assert shown + sum(numbers) == len(events)


def test_the_summary_says_the_first_action_whole(copied, tmp_path):
    idle = "If weights are meant to change there (averages, perturbations), nothing is wrong."
    action = "Otherwise look for what writes to them between the forward pass and the update."
    advice = f"{idle} {action} {'Then compare what each rank holds. ' * 12}"
    event = {"id": "update.weights", "cause": "update.weights", "next_check": advice}
    output = call_in("40", with_findings(copied, tmp_path / "long", event)).output
    assert f"{idle} {action} …" in " ".join(output.split())


WRITES = """
import json, sys
from pathlib import Path
from rankscope.record.begin import WriterLock
run, whole = map(Path, sys.argv[1:])
lock = WriterLock(run)
print(flush=True)
sys.stdin.readline()
(whole / "steps").rename(run / "steps")
(whole / "run.json").rename(run / "run.json")
lock.release()
"""


def test_a_run_that_is_still_written_after_its_training_is_waited_for(
    healthy, tmp_path, monkeypatch
):
    run, whole = tmp_path / "run", tmp_path / "whole"
    for place in (run, whole):
        shutil.copytree(healthy, place)
    shutil.rmtree(run / "steps")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    command = [sys.executable, "-c", WRITES, str(run), str(whole)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        here = socket.gethostname()
        info = json.loads((run / "run.json").read_text())
        ranks = [{"rank": rank, "host": here, "pid": ended.pid} for rank in range(8)]
        info |= {"status": "running", "ranks": ranks, "agent": {"host": here, "pid": writer.pid}}
        (run / "run.json").write_text(json.dumps(info))
        writer.stdout.readline()
        with monkeypatch.context() as patch:
            patch.setattr("rankscope.cli.report._WRITING_SECONDS", 0.0)
            said = " ".join(call(run, "--no-html").output.split())
            assert f"and its agent (process {writer.pid}) still writes the record." in said
        monkeypatch.setattr("rankscope.cli.report._WRITING_SECONDS", 60.0)
        monkeypatch.setattr("rankscope.cli.report.time.sleep", lambda _: writer.communicate(b"."))
        assert "HEALTHY" in call(run, "--no-html").output


def call_in(columns, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", columns)
        return call(*arguments)


def test_a_directory_of_runs_is_listed(healthy, copied, tmp_path):
    shutil.copytree(healthy, tmp_path / "runs" / "sft" / "first")
    shutil.copytree(copied, tmp_path / "runs" / "second")
    broken = tmp_path / "runs" / "third"
    broken.mkdir()
    (broken / "run.json").write_text("{}")

    result = call_in("100", tmp_path / "runs")
    assert result.exit_code == 1
    lines = [line for line in result.output.splitlines() if line and line[2] != " "]
    assert lines[0] == "  3 runs"
    assert [line.split()[0] for line in lines[2:5]] == ["second", "third", "sft/first"]
    assert "error" in lines[2]
    assert "unreadable" in lines[3]
    assert "healthy" in lines[4]
    assert not (tmp_path / "runs" / "report.html").exists()

    told = json.loads(call(tmp_path / "runs", "--json").stdout)
    assert told["kind"] == "runs"
    assert told["severity"] == "error"
    assert [run["verdict"] for run in told["runs"]] == ["error", "unreadable", "healthy"]
    assert told["runs"][2]["path"] == str(tmp_path / "runs" / "sft" / "first")
    assert told["runs"][2]["num_steps"] == 64

    assert call(tmp_path / "runs" / "sft").exit_code == 0
    shutil.rmtree(tmp_path / "runs" / "second")
    assert call(tmp_path / "runs").exit_code == 2
    wrong = call(tmp_path / "runs", "--format", "png")
    assert isinstance(wrong.exception, UsageError)
    assert "name one of the runs in it" in str(wrong.exception)

    (tmp_path / "runs" / "sft").rename(tmp_path / "runs" / "sft-llama-3-8b-lr-3e-4-warmup-100")
    for columns in ("40", "80", "100"):
        lines = call_in(columns, tmp_path / "runs").output.splitlines()
        assert {"  third", "  sft-llama-3-8b-lr-3e-4-warmup-100/first"} <= {*lines}
        assert sum(line.startswith(("    ? unreadable", "    ● healthy")) for line in lines) == 2


def test_fail_on(healthy, copied, tmp_path):
    assert call(healthy, "--no-html", "--fail-on", "note").exit_code == 0
    assert call(copied, "--no-html", "--fail-on", "warning").exit_code == 1
    assert call(copied, "--no-html", "--fail-on", "never").exit_code == 2

    softer = with_findings(copied, tmp_path / "softer", {"severity": "note"})
    assert call(softer, "--no-html").exit_code == 0
    assert call(softer, "--no-html", "--fail-on", "note").exit_code == 1


def test_a_study(study):
    result = call(study)

    assert result.exit_code == 1
    assert "S1-2, replicated" in result.output
    assert "Why the two readings differ" in result.output
    assert (study / "report.html").is_file()


def test_bad_input_is_an_error_of_ours_in_one_line(tmp_path):
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "study.json").write_text("{}")
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "recorded" / "parity").mkdir(parents=True)
    for path, message in [
        (tmp_path / "recorded", "holds a record for rankscope parity, and no run"),
        (tmp_path / "none", "no run directory"),
        (tmp_path / ("n" * 300), "(File name too long): check the path"),
        (empty, "no run.json"),
        (unfinished, "no summary.json yet"),
    ]:
        result = call(path)
        assert isinstance(result.exception, RunError)
        assert message in str(result.exception)
        assert "\n" not in str(result.exception)


@pytest.mark.parametrize("width", [40, 110])
def test_terminals_of_any_width(copied, study, width):
    console, file = shown(width)
    run = Run.open(copied)
    render_run(run, assess(run), console)
    render_study(study, console)

    assert max(len(line) for line in file.getvalue().splitlines()) <= min(width, 112)
    words = "".join(file.getvalue().split())
    assert "".join(assess(run).headline.split()) in words
    assert "data.duplicate_batches" in words


def test_names_cannot_control_the_terminal(tmp_path):
    run = record_run(tmp_path / "run", num_workers=2, num_steps=2, name=HOSTILE, model=HOSTILE)
    console, file = shown(200)
    render_run(run, assess(run), console)

    assert "[bold red]name[/]" in file.getvalue()
    assert not {"\x1b", "\x07", "\r"} & set(file.getvalue())


def test_again_shows_the_findings_of_a_new_diagnosis(copied, tmp_path):
    result = call(copied, "--again", "--no-html")
    assert result.exit_code == 1
    assert "data.duplicate_batches" in result.output
    assert "The findings are those in findings.jsonl." in result.output
    told = json.loads(call(copied, "--again", "--no-html", "--json").stdout)
    assert told["differences"] == []
    assert told["findings"][0]["cause"] == "data.duplicate_batches"
    assert "differences" not in json.loads(call(copied, "--no-html", "--json").stdout)

    other = {"severity": "note", "last_step": 2}
    gone = {**other, "id": HOSTILE, "cause": "numerics.nonfinite"}
    changed = with_findings(copied, tmp_path / "changed", gone, other)
    result = call(changed, "--again", "--no-html")
    assert result.exit_code == 1
    assert "These findings are not those in findings.jsonl." in result.output
    assert "only in findings.jsonl" in result.output
    assert "data.duplicate_batches: other severity, last step" in result.output
    assert "not closed" not in result.output
    axis = {"id": "loss.differs_along_axis:tp", "cause": "loss.differs_along_axis"}  # of messages,
    live = with_findings(changed, tmp_path / "live", gone, other, axis)  # which no table holds
    assert "along_axis:tp: only" not in call(live, "--again", "--no-html").output
    assert "\x1b" not in result.output
    told = json.loads(call(live, "--again", "--no-html", "--json").stdout)
    assert len(told["differences"]) == 2

    (changed / "findings.jsonl").unlink()
    info = json.loads((changed / "run.json").read_text()) | {"status": "running"}
    (changed / "run.json").write_text(json.dumps(info))
    assert call(changed, "--no-html").exit_code == 0
    result = call(changed, "--again", "--no-html")
    assert result.exit_code == 1
    assert "data.duplicate_batches: not in findings.jsonl" in result.output
    assert "The run is not closed" in result.output


# Formats ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(folder):
    return record_run(folder / "run", num_workers=4, num_steps=16, change=with_everything).path


def test_all_formats_of_a_run_and_where_they_go(run_dir, tmp_path):
    out = tmp_path / "out"
    result = call(run_dir, "--format", "md,png", "--format", "JSON", "--output", out)

    assert result.exit_code == 0
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*.*")) == [
        "figures/model.png", "figures/overview.png", "figures/workers.png",
        "report.json", "report.md",
    ]  # fmt: skip
    for path in (out / "figures").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 20_000
        assert f"(<figures/{path.name}>)" in (out / "report.md").read_text()
        assert str(path) in "".join(result.output.split("\n"))
    told = json.loads((out / "report.json").read_text())
    assert {**told, "report": None} == json.loads(call(run_dir, "--json", "--no-html").stdout)


def test_standard_output_holds_the_file_alone(run_dir):
    assert call(run_dir, "--format", "md", "--output", "-").stdout == (
        call(run_dir, "--format", "md", "--no-html", "--output", "-").stdout
    )
    assert json.loads(call(run_dir, "--format", "json", "--output", "-").stdout)["kind"] == "run"
    assert call(run_dir, "--format", "md", "--output", "-", "--fail-on", "note").exit_code == 1


def test_the_name_of_the_output_chooses_the_format(run_dir, tmp_path):
    assert call(run_dir, "--output", tmp_path / "a.md").exit_code in (0, 1)
    assert (tmp_path / "a.md").read_text().startswith("## ")
    refused = call(run_dir, "--output", tmp_path / "a.pdf")
    assert isinstance(refused.exception, UsageError)
    assert "print the page from a browser" in str(refused.exception)
    assert not (tmp_path / "a.pdf").exists()

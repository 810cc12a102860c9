import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from rankscope.cli.report import report
from rankscope.errors import MissingExtraError, UsageError, install_command
from report.recorded_runs import record_run, record_study, with_everything


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("formats") / "run"
    return record_run(place, num_workers=4, num_steps=16, change=with_everything).path


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("formats") / "study"
    return record_study(place, readings=("sharded",), num_steps=4)


def call(*arguments: str | Path) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(report)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_all_formats_of_a_run_and_where_they_go(run_dir: Path, tmp_path: Path):
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
    printed = json.loads(call(run_dir, "--json", "--no-html").stdout)
    assert {**told, "report": None} == printed


def test_a_single_format_goes_to_the_file_or_into_the_directory(run_dir: Path, tmp_path: Path):
    assert call(run_dir, "--format", "md", "--output", tmp_path / "a" / "x.md").exit_code == 0
    text = (tmp_path / "a" / "x.md").read_text()
    assert text.startswith("## ")
    assert call(run_dir, "--format", "md", "--output", tmp_path).exit_code == 0
    assert (tmp_path / "report.md").read_text() == text
    assert call(run_dir, "--format", "md").exit_code == 0
    assert (run_dir / "report.md").read_text() == text
    assert not (run_dir / "report.html").exists()


def test_standard_output_holds_the_file_alone(run_dir: Path):
    assert call(run_dir, "--format", "md", "--output", "-").stdout == (
        call(run_dir, "--format", "md", "--no-html", "--output", "-").stdout
    )
    told = json.loads(call(run_dir, "--format", "json", "--output", "-").stdout)
    assert told["kind"] == "run"
    assert call(run_dir, "--format", "md", "--output", "-", "--fail-on", "note").exit_code == 1


@pytest.mark.parametrize(
    "words", [["--output", "-"], ["--format", "md,json", "--output", "-"],
              ["--format", "json", "--json", "--output", "-"]],
)  # fmt: skip
def test_standard_output_takes_one_text(run_dir: Path, words: list[str]):
    assert isinstance(call(run_dir, *words).exception, UsageError)


def test_json_names_what_was_written(run_dir: Path, tmp_path: Path):
    told = json.loads(call(run_dir, "--json", "--format", "md", "--output", tmp_path).stdout)
    assert told["written"] == [str(tmp_path / "report.md")]
    assert told["report"] is None


def test_an_unknown_format_is_bad_usage(run_dir: Path):
    result = call(run_dir, "--format", "md,pdf")
    assert result.exit_code == 2
    assert "'pdf' is not one of" in result.stderr
    assert not (run_dir / "report.pdf").exists()


def test_a_study(study: Path, tmp_path: Path):
    result = call(study, "--format", "png,md", "--output", tmp_path)
    assert result.exit_code in {0, 1}
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {"averaged-loss.png", "metrics.png", "cosine-heatmap.png"}
    text = (tmp_path / "report.md").read_text()
    assert "S1-3, sharded" in text
    assert all(f"(<figures/{name}>)" in text for name in names)


def test_markdown_needs_no_extra_and_pictures_say_which(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    for name in [name for name in sys.modules if name.startswith("rankscope.report.")]:
        monkeypatch.delitem(sys.modules, name)
    assert call(run_dir, "--format", "md", "--output", tmp_path / "x.md").exit_code == 0
    result = call(run_dir, "--format", "png", "--output", tmp_path)
    assert isinstance(result.exception, MissingExtraError)
    assert install_command("web") in str(result.exception)


def test_a_run_whose_name_is_no_utf8(run_dir: Path, tmp_path: Path):
    run = tmp_path / os.fsdecode(b"mod\xe8le")
    shutil.copytree(run_dir, run)
    for options in ([], ["--json"], ["--format", "html,md,json,png"]):
        assert call(run, *options).exit_code == 0
    assert "Written: " in call(run, "--format", "md").stdout
    assert "mod?le" in call(run, "--format", "md", "--output", "-").stdout
    assert "mod?le" in (run / "report.html").read_text("utf-8")
    assert "mod?le" in (run / "report.md").read_text("utf-8")
    assert json.loads((run / "report.json").read_text("utf-8"))["path"] == str(run)


def test_the_name_of_the_output_chooses_the_format(run_dir, tmp_path):
    assert call(run_dir, "--output", tmp_path / "a.md").exit_code in (0, 1)
    assert (tmp_path / "a.md").read_text().startswith("## ")
    refused = call(run_dir, "--output", tmp_path / "a.pdf")
    assert isinstance(refused.exception, UsageError)
    assert "print the page from a browser" in str(refused.exception)
    assert not (tmp_path / "a.pdf").exists()

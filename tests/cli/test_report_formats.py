import json
from pathlib import Path

import pytest

from cli.test_report import call
from rankscope.errors import UsageError
from report.recorded_runs import record_run, with_everything


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("formats") / "run"
    return record_run(place, num_workers=4, num_steps=16, change=with_everything).path


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


def test_standard_output_holds_the_file_alone(run_dir: Path):
    assert call(run_dir, "--format", "md", "--output", "-").stdout == (
        call(run_dir, "--format", "md", "--no-html", "--output", "-").stdout
    )
    told = json.loads(call(run_dir, "--format", "json", "--output", "-").stdout)
    assert told["kind"] == "run"
    assert call(run_dir, "--format", "md", "--output", "-", "--fail-on", "note").exit_code == 1


def test_the_name_of_the_output_chooses_the_format(run_dir, tmp_path):
    assert call(run_dir, "--output", tmp_path / "a.md").exit_code in (0, 1)
    assert (tmp_path / "a.md").read_text().startswith("## ")
    refused = call(run_dir, "--output", tmp_path / "a.pdf")
    assert isinstance(refused.exception, UsageError)
    assert "print the page from a browser" in str(refused.exception)
    assert not (tmp_path / "a.pdf").exists()

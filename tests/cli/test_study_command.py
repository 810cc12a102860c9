"""Bad input to ``rankscope study``: one line, exit code 2, nothing created or overwritten."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from rankscope.cli import main
from rankscope.record import Run
from support.study_command import (
    StudyCommand,
    cache_base,
    names,
    shared_folder,
    short_records,
    tree,
)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyCommand:
    return StudyCommand(shared_folder(tmp_path_factory.getbasetemp()))


@pytest.fixture(scope="module")
def finished(study: StudyCommand, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small study on data of which a part cannot be used; tests work on copies of it."""
    folder = tmp_path_factory.mktemp("finished")
    data = folder / "records.jsonl"
    rows = short_records()
    rows[3]["output"] = ""
    rows[5]["output"] = " \n"
    rows[7]["instruction"] = "word " * 400
    data.write_text("\n".join(map(json.dumps, rows)))
    cache_base(data, Path(study.environment["XDG_CACHE_HOME"]))
    options = {"data": data, "max_length": 256, "reading": "replicated", "settings": "s1-3"}
    process = study.call(folder / "study", steps=2, **options)
    (folder / "stderr").write_text(process.stderr)
    return folder


class Refused:
    """Calls the command in this process, and expects that it refuses and changes nothing."""

    def __init__(self, study: StudyCommand, folder: Path, monkeypatch: Any, capsys: Any) -> None:
        self.study, self.folder = study, folder
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, output: Path | None = None, **options: Any) -> str:
        words = self.study.arguments(output or self.folder / "out", options)
        return self.command(*words)

    def command(self, *words: str) -> str:
        self._monkeypatch.setattr(sys, "argv", ["rankscope", *words])
        before = tree(self.folder), sorted(self.folder.rglob("*"))
        with pytest.raises(SystemExit) as ended:
            main.run()
        out, err = self._capsys.readouterr()
        assert ended.value.code == 2
        assert out == ""
        assert err.startswith("rankscope: ")
        assert len(err.splitlines()) == 1
        assert (tree(self.folder), sorted(self.folder.rglob("*"))) == before
        return str(err.removeprefix("rankscope: ").strip())


@pytest.fixture
def refused(
    study: StudyCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Refused:
    for name in ("XDG_CACHE_HOME", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, study.environment[name])
    return Refused(study, tmp_path, monkeypatch, capsys)


# Data ------------------------------------------------------------------------------------------


def test_records_that_cannot_be_used_are_counted_skipped_and_told(finished: Path) -> None:
    facts = json.loads((finished / "study" / "study.json").read_text())
    assert facts["skipped_empty"] == 2
    assert facts["skipped_truncated"] == 1
    assert facts["samples"] == 216 - 3
    run = Run.open(finished / "study" / "runs" / "replicated-s1-3")
    assert run.info["config"]["skipped_empty"] == 2
    assert (finished / "stderr").read_text().splitlines()[0] == (
        "Records left out: 2 with an empty output, 1 whose response is cut off by --max-length"
    )


# Options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"settings": "s1-4"}, "--settings expected some of s1-1, s1-2, s1-3, got 's1-4'"),
        ({"workers": 1}, "--workers must be at least 2, got 1"),
        ({"learning_rate": "nan"}, "--learning-rate must be a positive number, got nan"),
        ({"weights": "w"}, "--weights loads into --model pangu-1b only"),
        ({"resume": True, "overwrite": True}, "give one of them"),
    ],
)
def test_options_that_cannot_work(refused: Refused, options: Any, message: str) -> None:
    assert message in refused(**options)


# The directory ---------------------------------------------------------------------------------


@pytest.fixture
def existing(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished / "study", tmp_path / "study")


def same_options(finished: Path) -> dict[str, Any]:
    return {
        "data": finished / "records.jsonl",
        "max_length": 256,
        "reading": "replicated",
        "settings": "s1-3",
        "steps": 2,
    }


def test_an_existing_study_is_refused(refused: Refused, existing: Path, finished: Path) -> None:
    message = refused(existing, **same_options(finished))
    assert message == f"{existing} exists already; use --resume or --overwrite"


@pytest.mark.parametrize("flag", ["resume", "overwrite"])
def test_a_directory_that_is_no_study_is_never_touched(
    refused: Refused, tmp_path: Path, flag: str
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("…")
    assert "exists already; choose another" in refused(tmp_path / "precious")
    assert "choose another" in refused(tmp_path / "precious", **{flag: True})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"steps": 9}, "--steps was 2 and is 9"),
        ({"settings": "s1-1,s1-3"}, "--settings was s1-3 and is s1-1,s1-3"),
    ],
)
def test_resume_with_other_options(
    refused: Refused, existing: Path, finished: Path, changed: dict[str, Any], words: str
) -> None:
    message = refused(existing, **{**same_options(finished), **changed}, resume=True)
    assert f"{words}; use --overwrite or another --output" in message


def test_overwrite_leaves_what_no_study_wrote(
    study: StudyCommand, existing: Path, finished: Path
) -> None:
    (existing / "notes.txt").write_text("mine")
    old = tree(existing / "runs")
    process = study.call(existing, overwrite=True, **{**same_options(finished), "settings": "s1-1"})
    assert process.returncode == 0, process.stderr
    assert (existing / "notes.txt").read_text() == "mine"
    assert names(existing / "runs") == ["replicated-s1-1"]
    assert not set(tree(existing / "runs").items()) & set(old.items())
    assert len(json.loads((existing / "summary.json").read_text())) == 1

"""Bad input to ``rankscope study``: one line, exit code 2, nothing created or overwritten."""

import json
import shutil

import pytest

from rankscope.record import Run
from support.study_command import FinishedStudy, StudyCommand, shared_folder, tree

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return StudyCommand(shared_folder(tmp_path_factory.getbasetemp()))


@pytest.fixture(scope="module")
def finished(study):
    return FinishedStudy.make_once(study)


@pytest.fixture
def refused(study, tmp_path, monkeypatch, command):
    """Return a function that runs the command here, expects that it refuses and changes nothing."""
    for name in ("XDG_CACHE_HOME", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, study.environment[name])

    def refuse(output=None, **options):
        before = tree(tmp_path), sorted(tmp_path.rglob("*"))
        code, out, err = command(*study.arguments(output or tmp_path / "out", options))
        assert (code, out) == (2, "")
        assert err.startswith("rankscope: ")
        assert len(err.splitlines()) == 1
        assert (tree(tmp_path), sorted(tmp_path.rglob("*"))) == before
        return str(err.removeprefix("rankscope: ").strip())

    return refuse


# Data ------------------------------------------------------------------------------------------


def test_records_that_cannot_be_used_are_counted_skipped_and_told(finished):
    facts = json.loads((finished.done.path / "study.json").read_text())
    assert facts["skipped_empty"] == 2
    assert facts["skipped_truncated"] == 1
    assert facts["samples"] == 216 - 3
    run = Run.open(finished.done.path / "runs" / "replicated-s1-3")
    assert run.info["config"]["skipped_empty"] == 2
    first, second = finished.done.err.splitlines()[:2]
    assert first.startswith("Preparing data and model, which may take a minute; then ")
    assert second == (
        "Records left out: 2 with an empty output, 1 whose response is cut off by --max-length"
    )


# Options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"settings": "s1-4"}, "--settings expected some of s1-1, s1-2, s1-3, got 's1-4'"),
        ({"workers": 1}, "--workers must be at least 2, got 1"),
        ({"max_length": 1}, "--max-length must be at least 2 tokens, got 1"),
        ({"seed": -1}, "--seed must be between 0 and"),
        ({"learning_rate": "nan"}, "--learning-rate must be a positive number, got nan"),
        ({"weights": "w"}, "--weights loads into --model pangu-1b only"),
        ({"resume": True, "overwrite": True}, "give one of them"),
    ],
)
def test_options_that_cannot_work(refused, options, message):
    assert message in refused(**options)


# The directory ---------------------------------------------------------------------------------


@pytest.fixture
def existing(finished, tmp_path):
    return shutil.copytree(finished.done.path, tmp_path / "study")


def test_an_existing_study_is_refused(refused, existing, finished):
    message = refused(existing, **finished.options)
    assert message == f"{existing} exists already; use --resume or --overwrite"


@pytest.mark.parametrize("flag", ["resume", "overwrite"])
def test_a_directory_that_is_no_study_is_never_touched(refused, tmp_path, flag):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("…")
    assert "exists already; choose another" in refused(tmp_path / "precious")
    assert "choose another" in refused(tmp_path / "precious", **{flag: True})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"steps": 9}, "--steps was 7 and is 9"),
        ({"learning_rate": 0.1}, "--learning-rate was 0.0 and is 0.1"),
        ({"reading": "sharded"}, "--reading was sharded,replicated and is sharded"),
        ({"settings": "s1-1,s1-3"}, "--settings was s1-1,s1-2,s1-3 and is s1-1,s1-3"),
    ],
)
def test_resume_with_other_options(refused, existing, finished, changed, words):
    message = refused(existing, **{**finished.options, **changed}, resume=True)
    assert f"{words}; use --overwrite or another --output" in message

"""Whole studies: real workers over gloo, as ``rankscope study`` starts them."""

import importlib
import json
import shutil
import subprocess

import pytest
import torch

from rankscope.bus.evidence import Table
from support.forked_ranks import run_on_ranks
from support.study_command import (
    Done,
    FinishedStudy,
    StudyCommand,
    names,
    shared_folder,
    tables,
    tree,
)

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(900)]

ALL = [f"{reading}-s1-{i}" for reading in ("sharded", "replicated") for i in (1, 2, 3)]
WORKERS, STEPS, MICRO = 3, 7, 2


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return StudyCommand(shared_folder(tmp_path_factory.getbasetemp()))


@pytest.fixture(scope="module")
def finished(study):
    return FinishedStudy.make_once(study)


@pytest.fixture(scope="module")
def first(finished):
    return finished.done


# What a study leaves ---------------------------------------------------------------------------


def test_samples_are_named_by_their_record(first):
    named = first.columns(ALL[0], Table.WORKERS, "samples_named")["samples_named"]
    assert len(named)
    assert named.all()


def test_the_files(first):
    assert names(first.path) == [
        "figures",
        "models",
        "report.html",
        "runs",
        "study.json",
        "summary.json",
        "summary.md",
    ]
    assert names(first.path / "runs") == sorted(ALL)
    figures = sorted((first.path / "figures").iterdir())
    assert [path.name for path in figures] == [
        "averaged-loss.png",
        "cosine-heatmap.png",
        "metrics.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in figures)
    assert "<html" in (first.path / "report.html").read_text()[:500]


def test_accumulation_is_recorded_by_micro_batch(first):
    wanted = ("step", "rank", "micro", "loss", "loss_weight")
    micro = first.columns(ALL[0], Table.MICRO, *wanted)
    assert len(micro["step"]) == STEPS * WORKERS * MICRO
    assert sorted(set(micro["micro"])) == [0, 1]
    workers = first.columns(ALL[0], Table.WORKERS, "step", "rank", "loss", "loss_weight")
    for i, (step, rank) in enumerate(zip(workers["step"], workers["rank"], strict=True)):
        own = (micro["step"] == step) & (micro["rank"] == rank)
        assert workers["loss_weight"][i] == micro["loss_weight"][own].sum()
        mean = micro["loss"][own].mean()  # micro-batches count alike, as in the gradient
        assert workers["loss"][i] == pytest.approx(mean, rel=1e-6)


def test_saved_models_load_and_have_a_card(first):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = first.path / "models" / ALL[1]
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    inputs = tokenizer("Add the two numbers", return_tensors="pt")
    assert torch.isfinite(model(**inputs).logits).all()

    card = (path / "README.md").read_text()
    entry = next(entry for entry in first.summary() if entry["run"] == f"runs/{ALL[1]}")
    metadata = card.split("---")[1]
    assert "library_name: transformers" in metadata
    for words in (
        f"| Setting | {entry['setting'].upper()}",
        "| Reading | sharded |",
        "| Base | tiny (built-in base) |",
        "| Data | records.jsonl |",
        "3 × 2 × 2",
        f"| Optimizer steps | {STEPS} |",
        f"learning rate {entry['learning_rate']:g}",
        f"{entry['cosine_mean']:.3f}",
        f"{entry['loss_std']:.3f}",
        f"{entry['distinct_samples']} of {entry['samples_drawn']}",
        entry["headline"],
    ):
        assert words in card


# The same study again --------------------------------------------------------------------------


def test_resuming_a_finished_study_repeats_nothing(study, finished, command, tmp_path, monkeypatch):
    path = shutil.copytree(finished.done.path, tmp_path / "study")
    before = tree(path / "runs")
    words = study.arguments(path, {**finished.options, "json": True, "resume": True})
    monkeypatch.setattr("rankscope.cli.study._write_report", lambda output: "")
    code, out, err = command(*words)
    assert not code, err
    assert json.loads(out) == finished.done.summary()
    assert tree(path / "runs") == before


def import_transformers():
    importlib.import_module("transformers")


def test_ranks_of_a_launcher_overwrite_a_study_with_the_same_numbers(study, finished, tmp_path):
    path = shutil.copytree(finished.done.path, tmp_path / "study")
    (path / "notes.txt").write_text("mine")
    old = tree(path / "runs")
    options = {"settings": "s1-2", "save_all": True, "json": True, "overwrite": True}
    words = study.arguments(path, {**finished.options, **options})
    cache = {name: study.environment[name] for name in ("XDG_CACHE_HOME", "HF_HUB_OFFLINE")}
    code, out, err = run_on_ranks(WORKERS, words, tmp_path, prepare=import_transformers, **cache)
    done = Done(path, subprocess.CompletedProcess(words, code, out, err))
    assert done.code == 0, done.err
    assert json.loads(done.out) == done.summary()  # --json: the rest is said on the other stream
    assert f"Report: {path / 'report.html'}" in done.err
    assert "Traceback" not in done.err
    assert (path / "notes.txt").read_text() == "mine"
    assert not set(tree(path / "runs").items()) & set(old.items())
    combinations = ["replicated-s1-2", "sharded-s1-2"]
    assert names(path / "models") == names(path / "runs") == combinations
    assert len(done.summary()) == 2
    for name in combinations:
        ours, theirs = (tables(where / "runs" / name) for where in (path, finished.done.path))
        assert ours[Table.WORKERS].num_rows == STEPS * WORKERS
        for table in Table:
            assert ours[table].equals(theirs[table]), (name, table)


def test_another_number_of_ranks_than_of_workers(study, command, tmp_path, monkeypatch):
    sizes = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "one"}
    for name, value in {**sizes, **address}.items():
        monkeypatch.setenv(name, value)
    assert command(*study.arguments(tmp_path / "out", {})) == (
        2,
        "",
        "rankscope: torchrun started 1 ranks, the study has --workers 2; make them equal\n",
    )
    assert list(tmp_path.iterdir()) == []

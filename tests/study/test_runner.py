"""Whole studies: real workers over gloo, as ``rankscope study`` starts them."""

import importlib
import json
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from rankscope.bus.evidence import Table
from rankscope.cli import main
from rankscope.record import Run
from support.forked_ranks import run_on_ranks
from support.study_command import (
    Done,
    StudyCommand,
    names,
    shared_folder,
    tables,
    tree,
)

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(900)]

AGAIN = ["sharded-s1-2", "replicated-s1-2"]
ALL = [f"{reading}-s1-{i}" for reading in ("sharded", "replicated") for i in (1, 2, 3)]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyCommand:
    return StudyCommand(shared_folder(tmp_path_factory.getbasetemp()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("studies")


@pytest.fixture(scope="module")
def first(study: StudyCommand, folder: Path) -> Done:
    path = folder / "new" / "first"  # a parent that does not exist either
    return Done(path, study.call(path, report=True, accumulation=2))


@pytest.fixture(scope="module")
def again(study: StudyCommand, folder: Path, first: Done) -> Done:
    assert first.code == 0, first.err
    options = {"accumulation": 2, "save_all": True, "settings": "s1-2"}
    return Done(folder / "again", study.call(folder / "again", **options))


# What a study leaves ---------------------------------------------------------------------------


def test_samples_are_named_by_their_record(first: Done) -> None:
    named = first.columns(ALL[0], Table.WORKERS, "samples_named")["samples_named"]
    assert len(named)
    assert named.all()


def test_the_files(first: Done) -> None:
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


def test_the_summarys_metrics_are_those_of_the_workers(first: Done) -> None:
    for entry in first.summary():
        run = Run.open(first.path / entry["run"])
        losses_TW = run.per_worker("loss")[1]
        norms_TW = run.per_worker("grad_norm")[1]
        assert losses_TW.shape == norms_TW.shape == (3, 2)
        cosines_T = run.cosines()[1][:, 0, 1]
        expected = {
            "loss_std": losses_TW.std(axis=1).mean(),
            "loss_range": np.ptp(losses_TW, axis=1).mean(),
            "grad_norm_std": norms_TW.std(axis=1).mean(),
            "cosine_mean": cosines_T.mean(),
        }
        for name, value in expected.items():
            assert entry[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
        assert all(map(math.isfinite, (entry["loss_first"], entry["loss_last"])))


def test_accumulation_is_recorded_by_micro_batch(first: Done) -> None:
    wanted = ("step", "rank", "micro", "loss", "loss_weight")
    micro = first.columns(ALL[0], Table.MICRO, *wanted)
    assert len(micro["step"]) == 3 * 2 * 2
    assert sorted(set(micro["micro"])) == [0, 1]
    workers = first.columns(ALL[0], Table.WORKERS, "step", "rank", "loss", "loss_weight")
    for i, (step, rank) in enumerate(zip(workers["step"], workers["rank"], strict=True)):
        own = (micro["step"] == step) & (micro["rank"] == rank)
        assert workers["loss_weight"][i] == micro["loss_weight"][own].sum()
        mean = micro["loss"][own].mean()  # micro-batches count alike, as in the gradient
        assert workers["loss"][i] == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("name", [ALL[1]])
def test_saved_models_load_and_have_a_card(first: Done, name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = first.path / "models" / name
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    inputs = tokenizer("Add the two numbers", return_tensors="pt")
    assert torch.isfinite(model(**inputs).logits).all()

    card = (path / "README.md").read_text()
    entry = next(entry for entry in first.summary() if entry["run"] == f"runs/{name}")
    metadata = card.split("---")[1]
    assert "library_name: transformers" in metadata
    for words in (
        f"| Setting | {entry['setting'].upper()}",
        "| Reading | sharded |",
        "| Base | tiny (built-in base) |",
        "| Data | records.json |",
        "2 × 2 × 2",
        "| Optimizer steps | 3 |",
        f"learning rate {entry['learning_rate']:g}",
        f"{entry['cosine_mean']:.3f}",
        f"{entry['loss_std']:.3f}",
        f"{entry['distinct_samples']} of {entry['samples_drawn']}",
        entry["headline"],
    ):
        assert words in card


# The same seed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", AGAIN)
def test_the_same_seed_gives_the_same_bits(first: Done, again: Done, name: str) -> None:
    ours, theirs = (tables(done.path / "runs" / name) for done in (first, again))
    assert ours[Table.WORKERS].num_rows == 6
    for table in Table:
        assert ours[table].equals(theirs[table]), table


def test_resuming_a_finished_study_repeats_nothing(study: StudyCommand, first: Done) -> None:
    before = tree(first.path / "runs")
    process = study.call(first.path, accumulation=2, json=True, resume=True)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == first.summary()
    assert tree(first.path / "runs") == before


# Under torchrun --------------------------------------------------------------------------------


def import_transformers() -> None:
    importlib.import_module("transformers")


def test_ranks_of_a_launcher_give_the_same_numbers(
    study: StudyCommand, folder: Path, first: Done
) -> None:
    path = folder / "torchrun"
    options = {"accumulation": 2, "settings": "s1-1", "json": True}
    words = study.arguments(path, options)
    cache = {name: study.environment[name] for name in ("XDG_CACHE_HOME", "HF_HUB_OFFLINE")}
    code, out, err = run_on_ranks(2, words, folder, prepare=import_transformers, **cache)
    done = Done(path, subprocess.CompletedProcess(words, code, out, err))
    assert done.code == 0, done.err
    assert json.loads(done.out) == done.summary()  # --json: the rest is said on the other stream
    assert f"Report: {path / 'report.html'}" in done.err
    assert names(path / "models") == ["sharded-s1-1"]
    assert "Traceback" not in done.err
    for name in ("sharded-s1-1", "replicated-s1-1"):
        ours, theirs = (tables(where / "runs" / name) for where in (path, first.path))
        for table in Table:
            assert ours[table].equals(theirs[table]), (name, table)


def test_another_number_of_ranks_than_of_workers(
    study: StudyCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "one"}
    for name, value in {**sizes, **address}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["rankscope", *study.arguments(tmp_path / "out", {})])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 2
    assert capsys.readouterr() == (
        "",
        "rankscope: torchrun started 1 ranks, the study has --workers 2; make them equal\n",
    )
    assert list(tmp_path.iterdir()) == []

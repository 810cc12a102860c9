import importlib
import json
import re
import shutil
import subprocess
from functools import partial

import pytest
import torch

from rankscope.bus.evidence import Table
from rankscope.record import Run
from report.html_reader import Page
from support.forked_ranks import run_on_ranks
from support.recomputed import Recomputed
from support.study_command import Done, StudyCommand, names, tables, tree

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(900)]

ALL = [f"{reading}-s1-{i}" for reading in ("sharded", "replicated") for i in (1, 2, 3)]
WORKERS, STEPS, MICRO = 2, 7, 2
OPTIONS = {"workers": WORKERS, "steps": STEPS, "accumulation": MICRO, "max_length": 256}


@pytest.fixture(scope="module")
def study(folder):
    return StudyCommand(folder, unusable=True)


@pytest.fixture(scope="module")
def first(study, folder):
    """The study of all combinations, which no test changes."""
    path = folder / "new" / "finished"  # a parent that does not exist either
    done = Done(path, study.run(path, **OPTIONS))
    assert done.code == 0, done.err
    return done


@pytest.fixture
def copied(first, tmp_path):
    return shutil.copytree(first.path, tmp_path / "study")


# What a study leaves ---------------------------------------------------------------------------


def test_samples_are_named_by_their_record(first):
    named = first.columns(ALL[0], Table.WORKERS, "samples_named")["samples_named"]
    assert named.all()
    assert len(named)


def test_records_that_cannot_be_used_are_counted_skipped_and_told(first):
    facts = json.loads((first.path / "study.json").read_text())
    assert facts["skipped_empty"] == 2
    assert facts["skipped_truncated"] == 1
    assert facts["samples"] == 216 - 3
    assert Run.open(first.path / "runs" / "replicated-s1-3").info["config"]["skipped_empty"] == 2
    begun, left_out = first.err.splitlines()[:2]
    assert begun.startswith("Preparing data and model, which may take a minute; then ")
    assert left_out == (
        "Records left out: 2 with an empty output, 1 whose response is cut off by --max-length"
    )


def test_the_files(first):
    files = ["report.html", "study.json", "summary.json", "summary.md"]
    assert names(first.path) == sorted(["figures", "models", "runs", *files])
    assert names(first.path / "runs") == sorted(ALL)
    figures = ["averaged-loss.png", "cosine-heatmap.png", "metrics.png"]
    assert names(first.path / "figures") == figures
    for name in figures:
        assert (first.path / "figures" / name).read_bytes().startswith(b"\x89PNG")
    assert "<html" in (first.path / "report.html").read_text()[:500]


def test_accumulation_is_recorded_by_micro_batch(first):
    micro = first.columns(ALL[0], Table.MICRO, *("step", "rank", "micro", "loss", "loss_weight"))
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
    inputs = AutoTokenizer.from_pretrained(path)("Add the two numbers", return_tensors="pt")
    assert torch.isfinite(model(**inputs).logits).all()

    card = (path / "README.md").read_text()
    entry = next(entry for entry in first.summary() if entry["run"] == f"runs/{ALL[1]}")
    assert "library_name: transformers" in card.split("---")[1]
    for words in (
        f"| Setting | {entry['setting'].upper()}",
        "| Reading | sharded |",
        "| Base | tiny (built-in base) |",
        "| Data | records.jsonl |",
        "2 × 2 × 2",
        f"| Optimizer steps | {STEPS} |",
        f"learning rate {entry['learning_rate']:g}",
        f"{entry['cosine_mean']:.3f}",
        f"{entry['loss_std']:.3f}",
        f"{entry['distinct_samples']} of {entry['samples_drawn']}",
        entry["headline"],
    ):
        assert words in card


# Every figure that is shown is that of the Parquet files -----------------------------------------


@pytest.fixture(scope="module")
def runs(first):
    return {name: Recomputed(first.path / "runs" / name) for name in ALL}


def test_the_terminals_table_has_means_over_the_run(first, runs):
    lines = first.out.splitlines()
    heads = next(line for line in lines if line.strip().startswith("Setting"))
    heads = re.split(r"\s{2,}", heads.strip())
    for name, run in runs.items():
        reading, _, setting = name.partition("-")
        line = next(one for one in lines if one.strip().startswith(f"{setting.upper()}, {reading}"))
        cells = dict(zip(heads, re.split(r"\s{2,}", line.strip()), strict=True))
        assert cells["Loss std"] == f"{run.mean['loss_std']:.3f}"
        assert cells["Norm std"] == f"{run.mean['grad_norm_std']:.3f}"
        assert cells["Cosine"] == f"{run.mean['cosine_mean']:.3f}"
        assert cells["× sampling"] == f"{run.ratio:.2f}"
        assert cells["Different samples"] == f"{run.distinct} of {run.drawn}"
        assert cells["Averaged loss"] == f"{run.first:.2f} → {run.last:.2f}"
    told = " ".join(first.out.split())
    assert "Loss std, norm std and cosine are means over the steps of a run" in told
    assert "S1-1: every rank has the same seed; S1-2: rank 0 has its own seed; S1-3:" in told
    assert "2 workers · 7 steps · batch 2 each" in told


def test_sentences_on_the_readings_have_the_same_numbers(first, runs):
    told = " ".join(first.out.split())
    page = Page((first.path / "report.html").read_text()).words
    markdown = (first.path / "summary.md").read_text()
    for reading in ("sharded", "replicated"):
        one, two, three = (runs[f"{reading}-s1-{i}"] for i in (1, 2, 3))
        cosines = [f"{run.mean['cosine_mean']:.3f}" for run in (one, two, three)]
        sentence = (
            f"Here the mean cosine is {cosines[0]} under S1-1, {cosines[1]} under S1-2 and "
            f"{cosines[2]} under S1-3. Different samples of {one.drawn} drawn: {one.distinct} "
            f"under S1-1, {two.distinct} under S1-2 and {three.distinct} under S1-3."
        )
        for words in (told, page, markdown):
            assert sentence in words


# The same study again --------------------------------------------------------------------------


def test_resuming_a_finished_study_repeats_nothing(study, first, copied, command, monkeypatch):
    before = tree(copied / "runs")
    words = study.arguments(copied, {**OPTIONS, "json": True, "resume": True})
    monkeypatch.setattr("rankscope.cli.study._write_report", lambda output: "")
    code, out, err = command(*words)
    assert not code, err
    assert json.loads(out) == first.summary()
    assert tree(copied / "runs") == before


def test_ranks_of_a_launcher_overwrite_a_study_with_the_same_numbers(study, first, copied):
    (copied / "notes.txt").write_text("mine")
    old = tree(copied / "runs")
    options = {"settings": "s1-2", "save_all": True, "json": True, "overwrite": True}
    words = study.arguments(copied, {**OPTIONS, **options})
    cache = {name: study.environment[name] for name in ("XDG_CACHE_HOME", "HF_HUB_OFFLINE")}
    cache["prepare"] = partial(importlib.import_module, "transformers")
    code, out, err = run_on_ranks(WORKERS, words, copied.parent, **cache)
    done = Done(copied, subprocess.CompletedProcess(words, code, out, err))
    assert done.code == 0, done.err
    assert json.loads(done.out) == done.summary()  # --json: the rest is said on the other stream
    assert f"Report: {copied / 'report.html'}" in done.err
    assert "Traceback" not in done.err
    assert (copied / "notes.txt").read_text() == "mine"
    assert not set(tree(copied / "runs").items()) & set(old.items())
    combinations = ["replicated-s1-2", "sharded-s1-2"]
    assert names(copied / "models") == names(copied / "runs") == combinations
    assert len(done.summary()) == 2
    for name in combinations:
        ours, theirs = (tables(where / "runs" / name) for where in (copied, first.path))
        assert ours[Table.WORKERS].num_rows == STEPS * WORKERS
        for table in Table:
            assert ours[table].equals(theirs[table]), (name, table)


def test_another_number_of_ranks_than_of_workers(study, command, tmp_path, monkeypatch):
    sizes = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "one"}
    for name, value in {**sizes, **address}.items():
        monkeypatch.setenv(name, value)
    words = "torchrun started 1 ranks, the study has --workers 2; make them equal"
    assert command(*study.arguments(tmp_path / "out", {})) == (2, "", f"rankscope: {words}\n")
    assert list(tmp_path.iterdir()) == []


# Bad input: one line, exit code 2, nothing created or overwritten --------------------------------


@pytest.fixture
def refused(study, tmp_path, monkeypatch, command):
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


def test_an_existing_study_is_refused(refused, copied):
    assert refused(copied, **OPTIONS) == f"{copied} exists already; use --resume or --overwrite"


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
def test_resume_with_other_options(refused, copied, changed, words):
    message = refused(copied, **{**OPTIONS, **changed}, resume=True)
    assert f"{words}; use --overwrite or another --output" in message

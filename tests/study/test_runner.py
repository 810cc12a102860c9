"""Whole studies: real workers over gloo, as ``rankscope study`` starts them."""

import json
import math
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
SHARDED = ALL[:3]
LAUNCHER = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
TINY = {"reading": "sharded", "settings": "s1-1", "batch_size": 1}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyCommand:
    return StudyCommand(shared_folder(tmp_path_factory.getbasetemp()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("studies")


@pytest.fixture(scope="module")
def first(study: StudyCommand, folder: Path) -> Done:
    path = folder / "new" / "first"  # a parent that does not exist either
    return Done(path, study.run(path, accumulation=2))


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


def test_it_ends_well_and_says_where_the_report_is(first: Done, again: Done) -> None:
    assert (first.code, again.code) == (0, 0), first.err + again.err
    assert f"Report: {first.path / 'report.html'}" in first.out
    assert "Why the two readings differ" in first.out
    assert "Traceback" not in first.err + again.err


def test_without_a_terminal_progress_is_a_line_per_training(first: Done) -> None:
    lines = [line.split(":")[0] for line in first.err.splitlines() if " steps" in line]
    assert lines == ALL
    assert "cosine +1.000" in next(line for line in first.err.splitlines() if ALL[3] in line)


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


def test_what_study_json_says(first: Done, study: StudyCommand) -> None:
    facts = json.loads((first.path / "study.json").read_text())
    assert facts["config"]["accumulation"] == 2
    assert facts["config"]["data"] == str(study.data)
    assert facts["records"] == 240
    assert facts["samples"] == 216  # a tenth is held out for the base model
    assert facts["skipped_empty"] == facts["skipped_truncated"] == facts["truncated"] == 0
    assert facts["model"] == "tiny (built-in base)"


def test_the_summary(first: Done) -> None:
    entries = first.summary()
    assert [f"{entry['reading']}-{entry['setting']}" for entry in entries] == ALL
    for entry in entries:
        assert entry["run"] == f"runs/{entry['reading']}-{entry['setting']}"
        assert (entry["num_workers"], entry["steps"], entry["batch_size"]) == (2, 3, 2)
        assert entry["samples_drawn"] == 2 * 3 * 2 * 2
        assert {"cosine_weighted", "loss_std_expected", "dispersion_ratio"} <= set(entry)
        assert {"effective_batch", "severity", "statements", "recommendation"} <= set(entry)
        assert entry["data"] == "records.json"
        assert entry["headline"]
    assert [entry["distinct_samples"] for entry in entries if entry["setting"] == "s1-1"] == [
        24,
        12,
    ]


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


def test_replicated_data_with_equal_seeds_leaves_nothing_to_disagree_on(first: Done) -> None:
    entry = first.summary()[3]
    assert entry["cosine_mean"] == 1.0
    assert entry["loss_std"] == entry["grad_norm_std"] == 0.0
    assert entry["severity"] == "error"


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


def test_samples_are_named_by_their_index_in_the_file(first: Done) -> None:
    samples = first.columns(ALL[0], Table.SAMPLES, "samples")["samples"]
    drawn = [int(index) for row in samples for index in row]
    assert len(drawn) == len(set(drawn)) == 24
    assert set(drawn) <= set(range(216))


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


def test_fine_tuning_changed_the_saved_models(first: Done) -> None:
    weights = [(first.path / "models" / n / "model.safetensors").read_bytes() for n in SHARDED]
    assert len(set(weights)) == 3


def test_the_sharded_models_are_saved_or_all(first: Done, again: Done) -> None:
    assert names(first.path / "models") == sorted(SHARDED)
    assert names(again.path / "models") == sorted(AGAIN)


def test_the_markdown_table_has_a_row_per_training(first: Done) -> None:
    text = (first.path / "summary.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| S1-")]
    assert [row.split(" | ")[0] for row in rows] == [
        f"| S1-{i}, {reading}" for reading in ("sharded", "replicated") for i in (1, 2, 3)
    ]
    assert all("nan" not in row for row in rows)


# The same seed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", AGAIN)
def test_the_same_seed_gives_the_same_bits(first: Done, again: Done, name: str) -> None:
    ours, theirs = (tables(done.path / "runs" / name) for done in (first, again))
    assert ours[Table.WORKERS].num_rows == 6
    for table in Table:
        assert ours[table].equals(theirs[table]), table


def test_the_same_seed_gives_the_same_model(first: Done, again: Done) -> None:
    file = f"models/{AGAIN[0]}/model.safetensors"
    ours, theirs = (done.path / file for done in (first, again))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.fixture(scope="module")
def half(study: StudyCommand, folder: Path, first: Done) -> Done:
    options = {**TINY, "batch_size": 2, "accumulation": 2, "precision": "bf16", "seed": 0}
    return Done(folder / "half", study.call(folder / "half", **options))


def test_bf16(half: Done, first: Done) -> None:
    assert half.code == 0, half.err
    losses = {
        done: Run.open(done.path / "runs" / ALL[0]).per_worker("loss")[1] for done in (half, first)
    }
    assert np.isfinite(losses[half]).all()
    assert not np.array_equal(losses[half], losses[first])
    assert losses[half] == pytest.approx(losses[first], rel=0.05)


def test_one_training_alone_gives_the_numbers_it_gives_among_others(
    half: Done, first: Done
) -> None:
    drawn = [tables(done.path / "runs" / ALL[0])[Table.SAMPLES] for done in (half, first)]
    assert drawn[0].equals(drawn[1])
    assert [entry["run"] for entry in half.summary()] == [f"runs/{ALL[0]}"]


def test_resuming_a_finished_study_repeats_nothing(study: StudyCommand, first: Done) -> None:
    before = tree(first.path / "runs")
    process = study.call(first.path, accumulation=2, json=True, resume=True)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == first.summary()
    assert tree(first.path / "runs") == before


# Under torchrun --------------------------------------------------------------------------------


def test_torchrun_gives_the_same_numbers(study: StudyCommand, folder: Path, first: Done) -> None:
    path = folder / "torchrun"
    options = {"accumulation": 2, "settings": "s1-1", "json": True}
    done = Done(path, study.run(path, launcher=LAUNCHER, **options))
    assert done.code == 0, done.err
    assert json.loads(done.out) == done.summary()  # --json: the rest is said on the other stream
    assert f"Report: {path / 'report.html'}" in done.err
    assert names(path / "models") == ["sharded-s1-1"]
    assert "Traceback" not in done.err
    for name in ("sharded-s1-1", "replicated-s1-1"):
        ours, theirs = (tables(where / "runs" / name) for where in (path, first.path))
        for table in Table:
            assert ours[table].equals(theirs[table]), (name, table)


def test_torchrun_with_bad_input(study: StudyCommand, tmp_path: Path) -> None:
    options = {**TINY, "data": "missing.json"}
    code, out, err = run_on_ranks(2, study.arguments(tmp_path / "out", options), tmp_path)
    assert (code, out) == (2, "")
    assert err == "rankscope: there is no data file missing.json: check the path\n"
    assert list(tmp_path.iterdir()) == []


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

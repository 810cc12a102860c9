"""Every figure that a study and the demo show is that of the Parquet files they leave."""

import json
import re
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from rankscope.record import Run
from report.html_reader import Page
from support.recomputed import Recomputed, rounded_alike
from support.study_command import FinishedStudy, StudyCommand, shared_folder

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

METRICS = ("loss_std", "grad_norm_std", "cosine_mean")
NAMES = [f"{reading}-s1-{i}" for reading in ("sharded", "replicated") for i in (1, 2, 3)]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The small study: its runs recomputed, and what terminal, page and Markdown show."""
    done = FinishedStudy.make_once(StudyCommand(shared_folder(tmp_path_factory.getbasetemp()))).done
    path = done.path
    return SimpleNamespace(
        runs={name: Recomputed(path / "runs" / name) for name in NAMES},
        out=done.out,
        err=done.err,
        page=Page((path / "report.html").read_text()),
        markdown=(path / "summary.md").read_text(),
        cards={name: (path / "models" / name / "README.md").read_text() for name in NAMES[:3]},
    )


def only_data(page: Page, name: str, at: int = 0) -> list[dict]:
    """Rows of a figure's data: of its layer ``at``, in the order of the layers."""
    spec = page.specs[name]
    layers = spec.get("layer", [spec])
    return spec["datasets"][layers[at]["data"]["name"]]


def assert_curve(rows, run, name):
    assert [row["step"] for row in rows] == run.steps
    np.testing.assert_allclose(
        [row["value"] for row in rows], run.by_step[name], rtol=1e-5, atol=2e-7
    )


def test_the_terminals_table_has_means_over_the_run(shown):
    lines = shown.out.splitlines()
    heads = next(line for line in lines if line.strip().startswith("Setting"))
    heads = re.split(r"\s{2,}", heads.strip())
    for name, run in shown.runs.items():
        reading, _, setting = name.partition("-")
        line = next(one for one in lines if one.strip().startswith(f"{setting.upper()}, {reading}"))
        cells = dict(zip(heads, re.split(r"\s{2,}", line.strip()), strict=True))
        assert cells["Loss std"] == f"{run.mean['loss_std']:.3f}"
        assert cells["Norm std"] == f"{run.mean['grad_norm_std']:.3f}"
        assert cells["Cosine"] == f"{run.mean['cosine_mean']:.3f}"
        assert cells["× sampling"] == f"{run.ratio:.2f}"
        assert cells["Different samples"] == f"{run.distinct} of {run.drawn}"
        assert cells["Averaged loss"] == f"{run.first:.2f} → {run.last:.2f}"
    told = " ".join(shown.out.split())
    assert "Loss std, norm std and cosine are means over the steps of a run" in told
    assert "S1-1: every rank has the same seed; S1-2: rank 0 has its own seed; S1-3:" in told
    assert "3 workers · 7 steps · batch 2 each" in told


def test_sentences_on_the_readings_have_the_same_numbers(shown):
    told = " ".join(shown.out.split())
    for reading in ("sharded", "replicated"):
        one, two, three = (shown.runs[f"{reading}-s1-{i}"] for i in (1, 2, 3))
        cosines = [f"{run.mean['cosine_mean']:.3f}" for run in (one, two, three)]
        sentence = (
            f"Here the mean cosine is {cosines[0]} under S1-1, {cosines[1]} under S1-2 and "
            f"{cosines[2]} under S1-3. Different samples of {one.drawn} drawn: {one.distinct} "
            f"under S1-1, {two.distinct} under S1-2 and {three.distinct} under S1-3."
        )
        for words in (told, shown.page.words, shown.markdown):
            assert sentence in words


def test_the_demos_two_runs(command, tmp_path, monkeypatch):
    """The second training is a copy of the first one's runs, in the place of those there."""
    from rankscope.cli import demo

    call = partial(command, "demo", "--output", tmp_path / "demo")
    monkeypatch.setattr(demo, "STEPS", 12)
    code, out, err = call()
    assert code == 0, err
    printed = " ".join(out.split())
    page = Page((tmp_path / "demo" / "report.html").read_text())
    runs = [Recomputed(tmp_path / "demo" / name) for name in demo.TRAININGS]
    for letter, run in zip("AB", runs, strict=True):
        assert (
            f"Averaged loss: {run.first:.2f} → {run.last:.2f} (first and last 5 steps), "
            "2 workers · 12 steps"
        ) in printed
        for name in ("loss", *METRICS):
            at = 1 if name == "loss" else 0  # the losses lie over the workers' bands
            rows = only_data(page, f"compare-{name}", at)
            own = [row for row in rows if row["run"] == letter]
            assert_curve(own, run, "loss_mean" if name == "loss" else name)
        band = [row for row in only_data(page, "compare-loss") if row["run"] == letter]
        np.testing.assert_allclose(
            [row["low"] for row in band], run.losses_TW.min(axis=1), rtol=1e-5
        )
        np.testing.assert_allclose(
            [row["high"] for row in band], run.losses_TW.max(axis=1), rtol=1e-5
        )
        assert rounded_alike(run.first, run.last) in page.words
        assert f"{run.mean['cosine_mean']:.3f}" in page.words
    assert "train on the same batches" in page.words

    code, _, err = call()
    assert code == 2
    assert "already holds a demo: add --overwrite" in err
    shutil.copytree(tmp_path / "demo", tmp_path / "trained")
    monkeypatch.setattr(
        "rankscope.lab.study.demo.train_both",
        lambda output, *_: [
            shutil.copytree(tmp_path / "trained" / name, output / name) for name in demo.TRAININGS
        ],
    )
    code, out, err = call("--overwrite", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["healthy"]["severity"] is None
    assert told["forgotten-sampler"]["severity"] == "error"
    assert told["forgotten-sampler"]["findings"][0]["cause"] == "data.duplicate_batches"
    assert "Training on 2 workers" in err
    for name in demo.TRAININGS:
        assert Run.open(tmp_path / "demo" / name).status == "complete"

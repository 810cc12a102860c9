import json
import shutil
from functools import partial

import numpy as np
import pytest

from rankscope.cli import demo
from rankscope.record import Run
from report.html_reader import Page
from report.recorded_runs import record_run
from support.recomputed import Recomputed, rounded_alike

METRICS = ("loss_std", "grad_norm_std", "cosine_mean")


def only_data(page, name, at=0):
    spec = page.specs[name]
    return spec["datasets"][spec.get("layer", [spec])[at]["data"]["name"]]


def assert_curve(rows, run, name):
    assert [row["step"] for row in rows] == run.steps
    values = [row["value"] for row in rows]
    np.testing.assert_allclose(values, run.by_step[name], rtol=1e-5, atol=2e-7)


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_every_figure_of_the_two_runs_is_that_of_their_files(command, tmp_path, monkeypatch):
    """The second training is a copy of the first one's runs, in the place of those there."""
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
            own = [row for row in only_data(page, f"compare-{name}", at) if row["run"] == letter]
            assert_curve(own, run, "loss_mean" if name == "loss" else name)
        band = [row for row in only_data(page, "compare-loss") if row["run"] == letter]
        ends = [(row["low"], row["high"]) for row in band]
        losses_TW = np.sort(run.losses_TW)[:, [0, -1]]
        np.testing.assert_allclose(ends, losses_TW, rtol=1e-5)
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
    assert not [*(tmp_path / "demo").glob(".demo-*")]


def test_a_training_that_fails_is_said(command, tmp_path, monkeypatch):
    folder = tmp_path / "demo"
    monkeypatch.setattr(demo, "STEPS", "no number")
    code, _, err = command("demo", "--output", folder)
    assert code == 2
    assert "the training failed: worker" in err
    assert "ValueError" in (folder / "error.log").read_text()
    for name in demo.TRAININGS:
        shutil.rmtree(folder / name, ignore_errors=True)
        record_run(folder / name, num_steps=3, num_workers=2)
    (folder / "error.log").unlink()
    assert command("demo", "--output", folder, "--overwrite")[0] == 2
    assert "ValueError" in (folder / "error.log").read_text()
    assert [len(Run.open(folder / name).steps("step")["step"]) for name in demo.TRAININGS] == [3, 3]
    assert not [*folder.glob(".demo-*")]

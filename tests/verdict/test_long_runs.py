import math
import shutil
from dataclasses import replace

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.evidence import Table
from rankscope.bus.step import GatheredStep
from rankscope.record import Run, RunWriter, reader, rollups, tables
from rankscope.verdict import assessment, dispersion
from rankscope.verdict.assessment import assess
from rankscope.verdict.dispersion import expected_cosines, noise_numbers
from record.step_reports import local_values
from support.micro_jobs import micro_step

W, STEPS, MICRO = 4, 300, 3


def gathered(step, rng):
    norms_WM = 2 + rng.random((W, MICRO))
    values = {
        "loss": 2 + rng.normal(size=W) / 8,
        "loss_sem": np.full(W, 0.125),
        "grad_norm": np.sqrt(np.square(norms_WM).mean(axis=1) / MICRO + 1),
        "reduced_norm": np.full(W, 1.1),
        "num_samples": np.full(W, 5),
        "step_seconds": np.full(W, math.nan) if step == 0 else 0.5 + rng.random(W) / 100,
        "overhead_seconds": rng.random(W) / 100,
    }
    return GatheredStep(
        step=step,
        time=float(step),
        observed=True,
        workers=local_values(step, W) | values,
        sketches_WK=None,
        samples=tuple(rng.integers(0, 20_000, 5) for _ in range(W)),
        micro_losses=tuple(np.full(MICRO, 2.0) for _ in range(W)),
        micro_weights=tuple(np.ones(MICRO) for _ in range(W)),
        micro_norms=tuple(norms_WM),
        micro_scales=tuple(np.full((W, MICRO), 1 / MICRO)),
        reduced_copies=W,
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    made = RunWriter(tmp_path_factory.mktemp("long") / "run", {"num_workers": W})
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        made.add(summarize(gathered(step, rng)))
        if step % 10 == 9:
            made.flush()
    made.close()
    return made.path


def test_a_long_run_is_assessed_as_if_read_whole_and_says_what_it_estimates(path, monkeypatch):
    run = Run.open(path)
    exact = assess(run)
    assert not run.is_long
    assert "too long" not in " ".join(exact.statements)

    monkeypatch.setattr(reader, "MAX_ROWS", 100)
    monkeypatch.setattr(assessment, "MAX_SAMPLES", 100)
    monkeypatch.setattr(Run, "per_worker", None)
    monkeypatch.setattr(Run, "sample_ids", None)
    assert run.is_long
    long = assess(run)
    assert exact.values.keys() == long.values.keys()
    for name, value in exact.values.items():
        close = 0.03 if name in {"overhead_share", "distinct_samples"} else 1e-9
        wanted = value if value is None else pytest.approx(value, rel=close)
        assert long.values[name] == wanted, name
    assert long.headline == exact.headline
    assert "too long to read every row again" in long.statements[-1]


def test_micro_batches_of_a_long_run_are_read_in_an_even_choice_of_steps(path, monkeypatch):
    exact = dispersion.noise_numbers(Run.open(path))
    monkeypatch.setattr(reader, "MAX_ROWS", 100)
    monkeypatch.setattr(dispersion, "MAX_MICRO_ROWS", STEPS * W * MICRO // 4)
    few = dispersion.noise_numbers(Run.open(path))
    assert few["gradient_ratio"] != exact["gradient_ratio"]
    assert few["gradient_ratio_low"] < exact["gradient_ratio"] < few["gradient_ratio_high"]
    assert few["noise_scale_in_samples"]
    assert few["noise_scale_from_micro"]
    assert few["noise_scale_batch"] == exact["noise_scale_batch"] == W * 5


def test_a_long_run_without_roll_ups_is_read_in_pieces(path, tmp_path, monkeypatch):
    exact = assess(Run.open(path)).values
    bare = shutil.copytree(path, tmp_path / "run", ignore=shutil.ignore_patterns("rollups"))
    for module in (reader, rollups):
        monkeypatch.setattr(module, "MAX_ROWS", STEPS * W - 1)
    monkeypatch.setattr(assessment, "MAX_SAMPLES", 100)
    monkeypatch.setattr(tables, "PIECE_VALUES", 50)
    monkeypatch.setattr(Run, "sample_ids", None)
    run = Run.open(bare)
    assert run.is_long
    assert rollups.read_coverage(bare) is None
    long = assess(run).values
    assert long["overhead_share"] == pytest.approx(exact["overhead_share"], rel=0.03)
    assert long["distinct_samples"] == exact["distinct_samples"]
    assert long["samples_exact"]


SIGNAL = 0.5  # of each element; the noise of a micro-batch has a standard deviation of 1


def weighted(path, rng):
    """Record steps in which every worker divides by its own tokens, which differ by micro-batch."""
    writer = RunWriter(path, {"num_workers": W})
    for step in range(80):
        tokens_WM = np.exp(0.8 * rng.standard_normal((W, MICRO)))
        shares_WM = tokens_WM / tokens_WM.sum(axis=1, keepdims=True)
        noise_WMP = rng.standard_normal((W, MICRO, 400)) / np.sqrt(tokens_WM)[..., None]
        gradients = MICRO * shares_WM[..., None] * (2 * SIGNAL + noise_WMP)
        gathered = micro_step(step, np.ones((W, MICRO)), gradients=gradients)
        sketches_WK = gradients.mean(axis=1).astype(np.float32)
        scales = tuple(512.0 * shares_WM)
        gathered = replace(gathered, sketches_WK=sketches_WK, micro_scales=scales)
        writer.add(summarize(gathered))
        if step % 10 == 9:
            writer.flush()
    writer.close()
    return Run.open(path)


@pytest.mark.parametrize("long", [False, True])
def test_tokens_that_weigh_micro_batches_are_no_noise_in_the_report(tmp_path, monkeypatch, long):
    run = weighted(tmp_path / "run", np.random.default_rng(0))
    if long:
        monkeypatch.setattr(reader, "MAX_ROWS", 0)
    assert run.is_long == long
    assert noise_numbers(run)["gradient_ratio"] == pytest.approx(1, abs=0.02)
    measured_T = run.columns(Table.STEPS, "cosine_weighted")["cosine_weighted"]
    assert expected_cosines(run)[1].mean() == pytest.approx(measured_T.mean(), abs=0.01)

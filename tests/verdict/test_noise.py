"""What sampling alone would give, from the micro-batches inside the workers."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope import Run
from rankscope.agent.assembly import summarize
from rankscope.bus.evidence import Table
from rankscope.record import RunWriter, reader
from rankscope.verdict.dispersion import expected_cosines, noise_numbers
from support.micro_jobs import micro_step

W, MICRO, SIZE, STEPS = 8, 4, 400, 40
SIGNAL = 0.5  # of each element; the noise of a micro-batch has a standard deviation of 1


def weighted(path, rng, *, known=True):
    """Record steps in which every worker divides by its own tokens, which differ by micro-batch."""
    writer = RunWriter(path, {"num_workers": W})
    for step in range(2 * STEPS):
        tokens_WM = np.exp(0.8 * rng.standard_normal((W, MICRO)))
        shares_WM = tokens_WM / tokens_WM.sum(axis=1, keepdims=True)
        noise_WMP = rng.standard_normal((W, MICRO, SIZE)) / np.sqrt(tokens_WM)[..., None]
        gradients = MICRO * shares_WM[..., None] * (2 * SIGNAL + noise_WMP)
        gathered = micro_step(step, np.ones((W, MICRO)), gradients=gradients)
        gathered = replace(
            gathered,
            sketches_WK=gradients.mean(axis=1).astype(np.float32),
            micro_scales=tuple(512.0 * shares_WM) if known else (),
        )
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

"""The cosine that sampling alone would give, from the micro-batches inside the workers."""

import numpy as np
import pytest

from diagnose.micro_jobs import micro_step
from rankscope import Run
from rankscope.core.summarize import summarize
from rankscope.diagnose.noise import expected_cosines
from rankscope.record import RunWriter

W, MICRO, SIZE, STEPS = 8, 4, 400, 40
SIGNAL = 0.5  # of each element; the noise of a micro-batch has a standard deviation of 1
TRUE = SIGNAL**2 / (SIGNAL**2 + 1 / MICRO)


def recorded(path, draw):
    """Record steps of micro-batches with gradients ``[W, M, P]``; return the run, its cosines."""
    writer = RunWriter(path, {"num_workers": W})
    measured = []
    for step in range(STEPS):
        gradients = None if draw is None else SIGNAL + draw()
        writer.add(summarize(micro_step(step, np.ones((W, MICRO)), gradients=gradients)))
        if gradients is not None:
            local = gradients.mean(axis=1)
            products = local @ local.T
            norms = np.sqrt(np.outer(products.diagonal(), products.diagonal()))
            measured.append((products.sum() - np.trace(products)) / (norms.sum() - np.trace(norms)))
    writer.close()
    return Run.open(path), measured


def test_it_is_the_cosine_of_workers_that_draw_alike(tmp_path):
    rng = np.random.default_rng(0)
    run, measured = recorded(tmp_path / "run", lambda: rng.standard_normal((W, MICRO, SIZE)))
    steps_T, cosines_T = expected_cosines(run)
    assert steps_T.tolist() == list(range(STEPS))
    assert cosines_T == pytest.approx(TRUE, abs=0.1)
    assert cosines_T.mean() == pytest.approx(TRUE, abs=0.01)
    assert np.mean(measured) == pytest.approx(TRUE, abs=0.01)


def test_it_stays_where_it_is_when_all_workers_draw_the_same(tmp_path):
    rng = np.random.default_rng(0)
    run, measured = recorded(
        tmp_path / "run", lambda: np.repeat(rng.standard_normal((1, MICRO, SIZE)), W, axis=0)
    )
    assert np.array(measured) == pytest.approx(1.0)
    assert expected_cosines(run)[1].mean() == pytest.approx(TRUE, abs=0.02)


def test_nothing_is_expected_where_no_gradient_was_measured(tmp_path):
    run, _ = recorded(tmp_path / "run", None)
    steps_T, cosines_T = expected_cosines(run)
    assert len(steps_T) == len(cosines_T) == 0

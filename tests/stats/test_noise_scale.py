"""Noise of gradients from norms alone, against gradients whose noise is known."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from rankscope.stats.noise_scale import Estimate, micro_shares, noise_of_steps, noise_scale

WORKERS, MICRO, SIZE = 4, 3, 200
TRUTH = np.linspace(-0.3, 0.5, SIZE)
STD = np.linspace(0.5, 2.0, SIZE)
SIGNAL, NOISE = float(TRUTH @ TRUTH), float(STD @ STD)


def gradient_noise(norms, reduced, micro_squares_W, num_micro, share=math.nan):
    """The noise of one step, as plain numbers."""
    micro = math.nan if micro_squares_W is None else micro_squares_W.mean()
    numbers = np.square(norms).mean(), reduced, micro, num_micro, share
    found = noise_of_steps(*(np.array([number]) for number in numbers), len(norms))
    names = ("between", "within", "noise", "signal", "units")
    return SimpleNamespace(**{name: getattr(found, f"{name}_T")[0] for name in names})


def share_of(scales_WM):
    """Return the share of one step, given the multipliers of each worker's micro-batches."""
    scales_WM = np.asarray(scales_WM)
    with np.errstate(over="ignore"):
        sums_W, squares_W = scales_WM.sum(axis=1), np.square(scales_WM).sum(axis=1)
    return micro_shares(sums_W[None], squares_W[None], np.array([scales_WM.shape[1]]))[0]


def observe(rng):
    """Return the noise of one step of healthy workers."""
    micro = TRUTH + STD * rng.standard_normal((WORKERS, MICRO, SIZE))
    local = micro.mean(axis=1)
    squares = np.square(np.linalg.norm(micro, axis=2)).sum(axis=1)
    norms, reduced = np.linalg.norm(local, axis=1), float(np.linalg.norm(local.mean(axis=0)))
    share = share_of(np.full((WORKERS, MICRO), 1 / MICRO))
    return gradient_noise(norms, reduced, squares, MICRO, share)


def means():
    rng = np.random.default_rng(0)
    steps = [observe(rng) for _ in range(400)]
    return {
        name: np.mean([getattr(step, name) for step in steps])
        for name in ("between", "within", "noise", "signal", "units")
    }


def test_healthy_workers_give_the_true_noise_and_signal():
    found = means()
    assert found["noise"] == pytest.approx(NOISE, rel=0.02)
    assert found["signal"] == pytest.approx(SIGNAL, rel=0.05)
    assert found["between"] == pytest.approx(NOISE / MICRO, rel=0.02)
    assert found["within"] == pytest.approx(NOISE / MICRO, rel=0.02)
    assert found["units"] == WORKERS * MICRO


def test_shares_of_micro_batches():
    shares = micro_shares(
        np.array([[1.0, 1.0], [2.0, 2.0], [-3.0, 3.0], [1.0, 1.1], [1.0, 1.0005]]),
        np.array([[0.5, 0.82], [2.0, 3.28], [4.5, 4.5], [0.9, 0.9], [0.5, 0.5]]),
        np.full(5, 2),
    )
    assert shares == pytest.approx([0.66, 0.66, 0.5, 0.5, 0.5], abs=1e-3)


def test_an_interval_turned_round():
    found = noise_scale(Estimate(0.5, 0.25, 1.0))
    assert (found.value, found.low, found.high) == (2.0, 1.0, 4.0)
    open_ended = noise_scale(Estimate(0.1, -0.1, 0.3))
    assert open_ended.high == math.inf
    assert open_ended.low == pytest.approx(1 / 0.3)
    hidden = noise_scale(Estimate(-0.1, -0.3, 0.2))
    assert (hidden.value, hidden.low, hidden.high) == (math.inf, 5.0, math.inf)
    assert math.isnan(noise_scale(Estimate(0.5)).low)

"""Noise of gradients from norms alone, against gradients whose noise is known."""

import math

import numpy as np
import pytest

from rankscope.core.block_ratio import BlockRatio, Estimate, ratio_of_sums
from rankscope.core.direction import norm_weighted_cosine_from_mean
from rankscope.core.noise_scale import gradient_noise, micro_squares, noise_scale

WORKERS, MICRO, SIZE = 4, 3, 200
TRUTH = np.linspace(-0.3, 0.5, SIZE)
STD = np.linspace(0.5, 2.0, SIZE)
SIGNAL, NOISE = float(TRUTH @ TRUTH), float(STD @ STD)


def observe(rng, *, shared=False, kinds=0.0):
    """One step: workers may share their micro-batches, or have a mean gradient each."""
    micro = TRUTH + STD * rng.standard_normal((WORKERS, MICRO, SIZE))
    if shared:
        micro[:] = micro[0]
    micro += kinds * rng.standard_normal((WORKERS, 1, SIZE))
    local = micro.mean(axis=1)
    squares, num_micro = micro_squares(list(np.linalg.norm(micro, axis=2)))
    norms, reduced = np.linalg.norm(local, axis=1), float(np.linalg.norm(local.mean(axis=0)))
    return gradient_noise(norms, reduced, squares, num_micro), norms, reduced


def means(**options):
    rng = np.random.default_rng(0)
    steps = [observe(rng, **options)[0] for _ in range(400)]
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


def test_shared_data_leave_the_noise_within_and_none_between():
    found = means(shared=True)
    assert found["within"] == pytest.approx(NOISE / MICRO, rel=0.02)
    assert abs(found["between"]) < 1e-9 * NOISE


def test_data_of_different_kinds_add_to_the_noise_between():
    found = means(kinds=1.0)
    assert found["within"] == pytest.approx(NOISE / MICRO, rel=0.02)
    assert found["between"] == pytest.approx(NOISE / MICRO + SIZE, rel=0.03)


def test_without_micro_batches_the_noise_scale_is_the_cosine_in_other_words():
    norms = np.full(6, 2.0)
    for reduced in (0.9, 1.3, 1.9):
        found = gradient_noise(norms, reduced, None, 1)
        cosine = norm_weighted_cosine_from_mean(norms, reduced)
        assert found.noise / found.signal == pytest.approx((1 - cosine) / cosine)
        assert math.isnan(found.within)
        assert found.units == 6


def test_both_sizes_of_unit_agree_on_the_noise_scale():
    rng = np.random.default_rng(3)
    micro, workers = BlockRatio(), BlockRatio()
    for _ in range(500):
        full, norms, reduced = observe(rng)
        simple = gradient_noise(norms, reduced, None, 1)
        micro.add(full.noise, full.signal)
        workers.add(simple.noise * MICRO, simple.signal)
    for blocks in (micro, workers):
        assert ratio_of_sums(blocks.sums()).value == pytest.approx(NOISE / SIGNAL, rel=0.05)


def test_what_is_unknown_stays_unknown():
    found = gradient_noise(np.array([1.0, math.nan]), 1.0, None, 1)
    assert math.isnan(found.noise)
    assert math.isnan(gradient_noise(np.ones(1), 1.0, None, 1).between)
    gap = gradient_noise(np.ones(2), 1.0, np.array([2.0, math.nan]), 2)
    assert math.isnan(gap.within)
    assert gap.units == 2
    assert micro_squares([np.ones(2), np.ones(3)]) == (None, 1)
    assert micro_squares([]) == (None, 1)


def test_an_interval_turned_round():
    found = noise_scale(Estimate(0.5, 0.1, 0.25, 1.0))
    assert (found.value, found.low, found.high) == (2.0, 1.0, 4.0)
    open_ended = noise_scale(Estimate(0.1, 0.1, -0.1, 0.3))
    assert open_ended.high == math.inf
    assert open_ended.low == pytest.approx(1 / 0.3)
    hidden = noise_scale(Estimate(-0.1, 0.1, -0.3, 0.2))
    assert (hidden.value, hidden.low, hidden.high) == (math.inf, 5.0, math.inf)
    assert math.isnan(noise_scale(Estimate(0.5)).low)

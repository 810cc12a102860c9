"""The DeepSpeed tap on real ranks: it reads the gradient as it is, and changes no bit."""

import math

import numpy as np
import pytest

from support.deepspeed_modes import MODES, import_deepspeed
from support.deepspeed_training import WIDTH, observe, sketch_of, train_untapped
from support.ranks import run_ranks

NUM_RANKS, STEPS = 2, 3
ROUNDING = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 2e-3}  # of a reduction in this dtype

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def train_all(rank):
    return {
        mode.name: (*observe(rank, mode, STEPS), train_untapped(rank, mode, STEPS))
        for mode in MODES
    }


@pytest.fixture(scope="module")
def trained():
    return run_ranks(train_all, NUM_RANKS, timeout=280, prepare=import_deepspeed)


def each(steps):
    return [seen for ranks in steps for seen in ranks]


def check_sketches(steps):
    for seen in each(steps):
        expected = sketch_of(seen.truth).sketches.numpy()
        error = np.linalg.norm(seen.gradient["totals"]["sketches"] - expected)
        assert error < 1e-6 * np.linalg.norm(expected)


def check_norms(steps, mode):
    """Exact where the gradient is whole, and estimated elsewhere."""
    for seen in each(steps):
        totals, expected = seen.gradient["totals"], sketch_of(seen.truth)
        norms, expected_norms = totals["squared_norms"], expected.squared_norms.numpy()
        assert seen.estimated == (mode.in_parts and mode.accumulate > 1)
        if seen.estimated:
            assert norms.sum() == pytest.approx(expected_norms.sum(), rel=3 * math.sqrt(2 / WIDTH))
        else:
            np.testing.assert_allclose(norms, expected_norms, rtol=1e-6)
            np.testing.assert_allclose(totals["largest"], expected.largest.numpy(), rtol=1e-6)
        assert not totals["nonfinite"].any()


def check_micro_batches(steps, mode):
    for seen in each(steps):
        norms = seen.gradient["micro_norms"]
        if mode.accumulate == 1:
            assert norms is None
        else:
            rel = 1e-6 if mode.in_parts else 5 / math.sqrt(2 * WIDTH)
            assert norms == pytest.approx(seen.micro_norms, rel=rel)


def check_what_passes_find(steps, mode):
    """What a pass finds is what the one before has left."""
    partitioned = mode.stage >= 2
    unknown = partitioned and (mode.style == "coalesce" or "offload_optimizer" in mode.zero)
    for seen in each(steps):
        kept = seen.gradient["kept"]
        if mode.accumulate == 1 or unknown:
            assert kept is None
            continue
        left, found = kept[: 2 * (mode.accumulate - 1)].reshape(-1, 2).T
        assert (left > 0).all()
        np.testing.assert_allclose(found, left, rtol=1e-6)
        assert np.nanmax(kept[2 * (mode.accumulate - 1) :]) < 1e-6


def check_the_reduced_gradient(steps, mode):
    """It is the mean before clipping."""
    if "offload_optimizer" in mode.zero:
        assert all(seen.gradient["reduced"] is None for seen in each(steps))
        return
    for ranks in steps:
        mean = {
            name: sum(seen.truth[name] for seen in ranks) / NUM_RANKS for name in ranks[0].truth
        }
        expected = sketch_of(mean)
        held = [seen.gradient["reduced"] for seen in ranks]
        wholes = held if mode.replicated else [{k: sum(h[k] for h in held) for k in held[0]}]
        for whole in wholes:
            norms, expected_norms = whole["squared_norms"], expected.squared_norms.numpy()
            np.testing.assert_allclose(norms.sum(), expected_norms.sum(), rtol=ROUNDING[mode.dtype])
            error = np.linalg.norm(whole["sketches"] - expected.sketches.numpy())
            assert error < ROUNDING[mode.dtype] * math.sqrt(expected_norms.sum())
            assert not whole["nonfinite"].any()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_what_is_read_is_the_gradient_before_and_after_the_reduction(trained, mode):
    steps = list(zip(*(by_mode[mode.name][0] for by_mode in trained), strict=True))
    check_sketches(steps)
    check_norms(steps, mode)
    check_micro_batches(steps, mode)
    check_what_passes_find(steps, mode)
    check_the_reduced_gradient(steps, mode)
    copies = NUM_RANKS if mode.replicated else 1
    for seen in each(steps):
        assert (seen.reduced_copies, seen.loss_scale) == (copies, mode.loss_scale)
        assert not seen.gradient["carried_over"]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_every_bit_is_the_same_and_nothing_is_left_behind(trained, mode):
    for by_mode in trained:
        _, tapped, plain = by_mode[mode.name]
        assert plain.state.keys() == tapped.state.keys()
        assert any(name.startswith("exp_avg") for name in plain.state)
        for name, value in plain.state.items():
            assert value.tobytes() == tapped.state[name].tobytes(), name
        assert tapped.hooked == 0

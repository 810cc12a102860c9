"""Which random generators forward passes move, with the real generators."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rankscope.evidence.randomness.probe import NUMPY, PYTHON, TORCH, RandomMeter
from rankscope.gradients.fingerprint import torch_state
from rankscope.stats.arrays import digest_of

CPU = torch.device("cpu")

DIGESTS = {PYTHON: "rng_digest_python", NUMPY: "rng_digest_numpy", TORCH: "rng_digest"}
DRAWS = {PYTHON: random.random, NUMPY: np.random.random, TORCH: lambda: torch.rand(1)}


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def meter_of(*passes, meter=None):
    """Return what is collected of a step with these forward passes."""
    meter = meter or RandomMeter(CPU)
    for draw in passes:
        meter.before_forward()
        draw()
        meter.after_forward()
    return meter.collect()


def nothing():
    pass


@pytest.mark.parametrize("bit", DRAWS)
def test_the_generator_that_a_forward_pass_moves_is_named(bit):
    assert meter_of(DRAWS[bit])["rng_used"] == bit


@pytest.mark.parametrize("bit", DRAWS)
def test_what_moves_from_one_step_to_the_next_is_told_apart(bit):
    seed_all(1)
    meter = RandomMeter(CPU)
    assert meter_of(nothing, meter=meter) == {"rng_used": 0}
    DRAWS[bit]()
    collected = meter_of(nothing, meter=meter)
    assert set(collected) == {"rng_used", DIGESTS[bit]}
    assert collected["rng_used"] == 16 * bit
    assert meter_of(nothing, meter=meter) == {"rng_used": 0}


@pytest.mark.parametrize("bit", DRAWS)
def test_digests_are_equal_when_the_used_generator_starts_equal(bit):
    digests = []
    for seed in (1, 1, 2):
        seed_all(seed)
        collected = meter_of(DRAWS[bit])
        assert set(collected) == {"rng_used", DIGESTS[bit]}
        digests.append(collected[DIGESTS[bit]])
    assert digests[0] == digests[1] != digests[2]
    assert all(0 <= digest < 2**63 for digest in digests)


def test_a_draw_that_changes_the_end_of_torchs_state_alone_is_seen():
    """The second of two normal numbers, which had been put aside."""
    torch.manual_seed(0)
    torch.randn(1)
    before, words_before = torch_state(), torch.get_rng_state()
    torch.randn(1)
    changed = (torch.get_rng_state() != words_before).nonzero()
    assert changed.min() > len(words_before) - 64
    assert torch_state() != before


def test_an_accelerator_whose_state_cannot_be_told_is_left_out(monkeypatch):
    def refuse(device):
        raise RuntimeError("capturing a graph")

    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(get_rng_state=refuse))
    assert meter_of(nothing, meter=RandomMeter(torch.device("cuda"))) == {"rng_used": 0}


def test_digests_are_the_same_in_every_process_and_release():
    assert digest_of(b"rankscope") == 8924695359294887236

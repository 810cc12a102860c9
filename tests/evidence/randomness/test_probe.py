"""Which random generators forward passes move, with the real generators."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rankscope.evidence.randomness.probe import ACCELERATOR, NUMPY, PYTHON, TORCH, RandomMeter
from rankscope.gradients.fingerprint import digest_of, numpy_state, python_state, torch_state
from support.ranks import run_ranks

CPU = torch.device("cpu")

DIGESTS = {PYTHON: "rng_digest_python", NUMPY: "rng_digest_numpy", TORCH: "rng_digest"}
DRAWS = {
    PYTHON: random.random,
    NUMPY: np.random.random,
    TORCH: lambda: torch.rand(1),
}
READERS = {PYTHON: python_state, NUMPY: numpy_state, TORCH: torch_state}


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


def test_several_generators_add_up_over_the_passes_of_a_step():
    used = meter_of(DRAWS[PYTHON], nothing, DRAWS[TORCH])["rng_used"]
    assert used == PYTHON | TORCH


def test_without_randomness_nothing_was_used_and_there_is_no_digest():
    assert meter_of(nothing, nothing) == {"rng_used": 0}


def test_a_step_without_a_whole_forward_pass_tells_nothing():
    meter = RandomMeter(CPU)
    assert meter.collect() == {}
    meter.before_forward()  # which raises
    assert meter.collect() == {}
    meter.after_forward()
    assert meter.collect() == {}


def test_what_moves_between_forward_passes_is_not_used_in_them():
    meter = RandomMeter(CPU)
    meter.before_forward()
    meter.after_forward()
    DRAWS[NUMPY]()  # an augmentation while the next batch is loaded
    meter.after_forward()  # of a pass that was not announced
    meter.before_forward()
    meter.after_forward()
    assert meter.collect() == {"rng_used": 0}


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
def test_what_a_forward_pass_moves_may_move_between_steps_as_well(bit):
    meter = RandomMeter(CPU)
    assert meter_of(DRAWS[bit], meter=meter)["rng_used"] == bit
    assert meter_of(DRAWS[bit], meter=meter)["rng_used"] == bit
    DRAWS[bit]()  # an augmentation
    assert meter_of(DRAWS[bit], meter=meter)["rng_used"] == bit + 16 * bit
    assert meter_of(DRAWS[bit], meter=meter)["rng_used"] == bit


def test_the_last_pass_of_a_step_counts_though_only_the_first_is_announced():
    meter, dropout = RandomMeter(CPU), DRAWS[TORCH]
    for _ in range(3):
        meter.before_forward()
        for _ in range(3):  # micro-batches
            dropout()
            meter.after_forward()
        assert meter.collect()["rng_used"] == TORCH


def test_after_a_step_without_a_whole_forward_pass_nothing_is_compared():
    meter = RandomMeter(CPU)
    meter_of(nothing, meter=meter)
    assert meter.collect() == {}
    DRAWS[TORCH]()
    assert meter_of(nothing, meter=meter) == {"rng_used": 0}


def test_each_step_begins_anew():
    meter = RandomMeter(CPU)
    assert meter_of(DRAWS[TORCH], meter=meter)["rng_used"] == TORCH
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


def test_generators_that_do_not_move_are_no_part_of_the_digest():
    digests = []
    for seed in (1, 2):
        seed_all(seed)
        torch.manual_seed(7)
        digests.append(meter_of(DRAWS[TORCH])["rng_digest"])
    assert digests[0] == digests[1]


def test_the_digest_is_of_the_states_before_the_first_pass():
    seed_all(1)
    first = meter_of(DRAWS[TORCH])["rng_digest"]
    seed_all(1)
    assert meter_of(nothing, DRAWS[TORCH], DRAWS[TORCH])["rng_digest"] == first


def test_dropout_is_seen_and_evaluation_is_not():
    dropout, x = torch.nn.Dropout(0.5), torch.ones(8)
    assert meter_of(lambda: dropout(x))["rng_used"] == TORCH
    dropout.eval()
    assert meter_of(lambda: dropout(x)) == {"rng_used": 0}


def test_a_draw_that_changes_the_end_of_torchs_state_alone_is_seen():
    """The second of two normal numbers, which had been put aside."""
    torch.manual_seed(0)
    torch.randn(1)
    before, words_before = torch_state(), torch.get_rng_state()
    torch.randn(1)
    changed = (torch.get_rng_state() != words_before).nonzero()
    assert changed.min() > len(words_before) - 64
    assert torch_state() != before


def test_random_numbers_are_the_same_as_without_the_meter():
    def numbers(meter):
        seed_all(3)
        drawn = []
        for _ in range(4):
            if meter:
                meter.before_forward()
            drawn += [random.gauss(0, 1), np.random.normal(), torch.randn(1).item()]  # noqa: NPY002
            if meter:
                meter.after_forward()
        return drawn

    assert numbers(RandomMeter(CPU)) == numbers(None)


@pytest.mark.parametrize("bit", READERS)
def test_a_state_returns_when_a_generator_does(bit):
    seed_all(5)
    before = READERS[bit]()
    DRAWS[bit]()
    assert READERS[bit]() != before
    seed_all(5)
    assert READERS[bit]() == before


def test_python_state_is_what_python_says_it_is():
    random.seed(11)
    for _ in range(700):  # past the end of the key, with and without a number put aside
        random.gauss(0, 1)
        _, words, gauss = random.getstate()
        assert python_state() == np.array(words).astype("L").tobytes() + repr(gauss).encode()


def test_numpy_state_is_what_numpy_says_it_is():
    np.random.seed(11)  # noqa: NPY002
    np.random.random(700)  # noqa: NPY002
    state = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    assert numpy_state() == state["key"].tobytes() + np.int32(state["pos"]).tobytes()


def test_another_kind_of_numpy_generator_is_followed_too():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        assert meter_of(DRAWS[NUMPY])["rng_used"] == NUMPY
        assert meter_of(nothing) == {"rng_used": 0}
    finally:
        np.random.set_bit_generator(before)


class Accelerator:
    """A device module with a generator of its own, as ``torch.cuda`` is one."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(1)
        self.asked_for = set()

    def get_rng_state(self, device):
        self.asked_for.add(device)
        return self.generator.get_state()

    def draw(self):
        torch.rand(1, generator=self.generator)


def test_the_accelerators_generator_is_that_of_the_models_device(monkeypatch):
    module, device = Accelerator(), torch.device("cuda:3")
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    collected = meter_of(module.draw, meter=RandomMeter(device))
    assert collected["rng_used"] == ACCELERATOR
    assert module.asked_for == {device}


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, AttributeError])
def test_an_accelerator_whose_state_cannot_be_told_is_left_out(monkeypatch, error):
    def refuse(device):
        raise error("capturing a graph")

    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(get_rng_state=refuse))
    assert meter_of(nothing, meter=RandomMeter(torch.device("cuda"))) == {"rng_used": 0}


def test_a_state_that_is_on_the_device_is_not_waited_for(monkeypatch):
    state = torch.zeros(16, dtype=torch.uint8, device="meta")
    module = SimpleNamespace(get_rng_state=lambda device: state)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert meter_of(nothing, meter=RandomMeter(torch.device("cuda"))) == {"rng_used": 0}


def digests_of_rank(rank):
    """Return the digest of a forward pass with dropout, from equal seeds and from own ones."""
    found = []
    for seed in (7, 7 + rank):
        seed_all(seed)
        collected = meter_of(lambda: [draw() for draw in DRAWS.values()])
        found.append(tuple(collected.values()))
    return found


@pytest.mark.ranks
def test_processes_agree_exactly_when_their_seeds_do():
    equal, own = zip(*run_ranks(digests_of_rank, 3), strict=True)
    assert {used for used, *_ in equal} == {PYTHON | NUMPY | TORCH}
    assert len(set(equal)) == 1
    for digests in list(zip(*own, strict=True))[1:]:
        assert len(set(digests)) == 3


def test_digests_are_the_same_in_every_process_and_release():
    assert digest_of(b"rankscope") == 8924695359294887236

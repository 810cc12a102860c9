"""The same bits in parameters, optimizer state and random generator, watched or not."""

import tempfile

import pytest

from support.modes import MODES, Mode, train
from support.ranks import run_ranks

STEPS = 4


def train_all(rank: int, folder: str) -> dict[str, tuple[dict, dict]]:
    """Train every mode without and with the monitor."""
    return {
        mode.name: (
            train(rank, mode, STEPS, None)["state"],
            train(rank, mode, STEPS, f"{folder}/{mode.name}")["state"],
        )
        for mode in MODES
    }


@pytest.fixture(scope="module", params=[2, 3], ids=["W=2", "W=3"])
def states(request):
    with tempfile.TemporaryDirectory() as folder:
        yield run_ranks(train_all, request.param, folder, timeout=240)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_every_bit_is_the_same(states, mode: Mode):
    for rank, by_mode in enumerate(states):
        plain, watched = by_mode[mode.name]
        for name, value in plain["parameters"].items():
            assert value.tobytes() == watched["parameters"][name].tobytes(), (rank, name)
        assert len(plain["optimizer"]) == len(watched["optimizer"]) > 0
        for before, after in zip(plain["optimizer"], watched["optimizer"], strict=True):
            for name, value in before.items():
                assert value.tobytes() == after[name].tobytes(), (rank, name)
        assert plain["rng"].tobytes() == watched["rng"].tobytes()


def test_the_comparison_would_see_a_difference(states):
    plain, _ = states[0][MODES[0].name]
    _, other = states[0][MODES[4].name]
    name = "head.weight"
    assert (plain["parameters"][name] != other["parameters"][name]).any()

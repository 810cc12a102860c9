"""The same bits of parameters, masters, optimizer state and random generator, tapped or not."""

from typing import Any

import pytest

from support.deepspeed_modes import MODES, import_deepspeed
from support.deepspeed_training import train
from support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


AS_OTHERS = (
    *("ZeRO 0 bf16 accumulate 2", "ZeRO 1 bf16 accumulate 2", "ZeRO 2 bf16 accumulate 1"),
    *("ZeRO 3 bf16 accumulate 1", "ZeRO 2 scattered", "ZeRO 2 all-reduced", "ZeRO 3 fp16"),
    *("ZeRO 2 boundary set", "ZeRO 2 unused", "ZeRO 3 unused", "ZeRO 0 used on one rank"),
)
"""Modes whose hooks are those of another one: what they read is tested, and not their bits."""

TRAINED = [mode for mode in MODES if mode.name not in AS_OTHERS]


def train_all(rank: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    return {
        mode.name: (train(rank, mode, range(0)), train(rank, mode, range(2))) for mode in TRAINED
    }


@pytest.fixture(scope="module")
def trainings():
    return run_ranks(train_all, 3, timeout=240, prepare=import_deepspeed)


@pytest.mark.parametrize("mode", TRAINED, ids=lambda mode: mode.name)
def test_every_bit_is_the_same_with_three_ranks(trainings, mode):
    for by_mode in trainings:
        plain, tapped = (training["state"] for training in by_mode[mode.name])
        assert plain.keys() == tapped.keys()
        assert any(name.startswith("exp_avg") for name in plain)
        for name, value in plain.items():
            assert value.tobytes() == tapped[name].tobytes(), name


@pytest.mark.parametrize("mode", TRAINED, ids=lambda mode: mode.name)
def test_nothing_is_left_behind(trainings, mode):
    assert all(by_mode[mode.name][1]["left"] == 0 for by_mode in trainings)


def test_the_comparison_would_see_a_difference(trainings):
    first, second = (trainings[0][TRAINED[i].name][0]["state"] for i in (0, 1))
    assert any(value.tobytes() != second[name].tobytes() for name, value in first.items())

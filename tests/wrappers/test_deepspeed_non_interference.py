"""The same bits of parameters, masters, optimizer state and random generator, tapped or not."""

from typing import Any

import pytest

from support.deepspeed_modes import MODES, import_deepspeed
from support.deepspeed_training import train
from support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


TRAINED = (
    *("ZeRO 1 bf16 accumulate 2", "ZeRO 1 overlapped", "ZeRO 2 fp32 accumulate 2"),
    *("ZeRO 3 all sharded", "ZeRO 3 offloaded", "ZeRO 1 fp16", "ZeRO 3 coalesced"),
    *("ZeRO 0 no_sync", "ZeRO 2 torch backward", "ZeRO 3 reentrant", "ZeRO 2 compiled"),
)
"""The others have the hooks of one of these: what they read is tested, and not their bits."""


def train_all(rank: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    return {
        mode.name: (train(rank, mode, range(0)), train(rank, mode, range(2)))
        for mode in MODES
        if mode.name in TRAINED
    }


@pytest.fixture(scope="module")
def trainings():
    return run_ranks(train_all, 2, timeout=240, prepare=import_deepspeed)


def test_every_bit_is_the_same_and_nothing_is_left_behind(trainings):
    for by_mode in trainings:
        for mode, (plain, tapped) in by_mode.items():
            assert plain["state"].keys() == tapped["state"].keys()
            assert any(name.startswith("exp_avg") for name in plain["state"])
            for name, value in plain["state"].items():
                assert value.tobytes() == tapped["state"][name].tobytes(), (mode, name)
            assert tapped["left"] == 0, mode

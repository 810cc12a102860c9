"""The same bits in parameters, optimizer state and random generator, tapped or not, under FSDP2."""

import pytest

from support.fsdp2_modes import MODES, Mode
from support.fsdp2_training import make_tap, optimize, start, state_of, train_step
from support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
STEPS, MORE_STEPS = 2, 3
"""Steps of most modes, and of those where the tap comes late and goes before the last step."""

AS_OTHERS = (
    *("resharded to two ranks", "bf16 reduced in fp32", "another divisor"),
    *("bf16 reduced in bf16", "fp16", "own reduce-scatter", "own all-reduce hook"),
)
"""Modes whose hooks are those of another one: what they read is tested, and not their bits."""

TRAINED = [mode for mode in MODES if mode.name not in AS_OTHERS]
ATTACHED_LATE = ("accumulated", "shard size 1")


def train(mode: Mode, num_steps: int, tapped: range) -> list[bytes]:
    """Train with dropout, with the tap in some of the steps; return all bits at the end."""
    session = start(mode, dropout=0.2)
    tap = None
    for step in range(num_steps):
        if step in tapped and tap is None:
            tap = make_tap(session)
        elif step not in tapped and tap is not None:
            tap.remove()
            tap = None
        train_step(session, step, tap)
        if tap is not None:
            assert tap.complete
            assert tap.collect() is not None
        optimize(session)
    if tap is not None:
        tap.remove()
    return state_of(session)


def work(rank: int) -> dict[str, list[list[bytes]]]:
    """Train every mode untapped and tapped; in some, also tapped in the middle step only."""
    results = {}
    for mode in TRAINED:
        late = mode.name in ATTACHED_LATE
        num_steps = MORE_STEPS if late else STEPS
        tapped = [range(0), range(num_steps)] + [range(1, 2)] * late
        results[mode.name] = [train(mode, num_steps, steps) for steps in tapped]
    return results


@pytest.fixture(scope="module")
def trainings():
    return run_ranks(work, 2, timeout=240)


def test_every_bit_is_the_same(trainings):
    for by_mode in trainings:
        assert len(by_mode) == len(TRAINED)
        for name, (never, *sometimes) in by_mode.items():
            assert len(never) > 20
            assert sometimes == [never] * (2 if name in ATTACHED_LATE else 1), name

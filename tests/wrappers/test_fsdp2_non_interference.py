"""The same bits in parameters, optimizer state and random generator, tapped or not, under FSDP2."""

import pytest

from support.fsdp2_modes import MODES, Mode
from support.fsdp2_training import make_tap, optimize, start, state_of, train_step
from support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
STEPS, MORE_STEPS = 2, 3
"""Steps of most modes, and of those where the tap comes late and goes before the last step."""

OF_THREE = ("1-D", "accumulated", "zeroed in place", "second dimension cut", "offloaded to CPU")
"""Tried on three ranks as well, whose shards are uneven."""

CASES = [(2, mode) for mode in MODES] + [(3, mode) for mode in MODES if mode.name in OF_THREE]
ATTACHED_LATE = ("1-D", "accumulated", "shard size 1", "compiled")


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


def work(rank: int, num_ranks: int) -> dict[str, list[list[bytes]]]:
    """Train every mode untapped and tapped; in some, also tapped in the middle step only."""
    results = {}
    for of_ranks, mode in CASES:
        if of_ranks == num_ranks:
            late = mode.name in ATTACHED_LATE
            num_steps = MORE_STEPS if late else STEPS
            tapped = [range(0), range(num_steps)] + [range(1, 2)] * late
            results[mode.name] = [train(mode, num_steps, steps) for steps in tapped]
    return results


@pytest.fixture(scope="module")
def trainings():
    return {num_ranks: run_ranks(work, num_ranks, num_ranks, timeout=240) for num_ranks in (2, 3)}


@pytest.mark.parametrize(
    ("num_ranks", "mode"),
    CASES,
    ids=[f"W={num_ranks}-{mode.name}" for num_ranks, mode in CASES],
)
def test_every_bit_is_the_same(trainings, num_ranks: int, mode: Mode):
    for by_mode in trainings[num_ranks]:
        never, *sometimes = by_mode[mode.name]
        assert len(never) > 20
        assert sometimes == [never] * (2 if mode.name in ATTACHED_LATE else 1)


def test_the_comparison_would_see_a_difference(trainings):
    plain, accumulated = trainings[2][0]["1-D"][0], trainings[2][0]["accumulated"][0]
    assert plain != accumulated

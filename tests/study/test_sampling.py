from collections import Counter
from itertools import islice

import numpy as np
import pytest

from rankscope.lab.study.config import Combination, Setting, ShardReading
from rankscope.lab.study.encoding import draw_batches

W, STEPS, BATCH, N = 8, 30, 4, 4096
DRAWN = STEPS * BATCH


def draw(reading: str, setting: str, *, seed: int = 0, steps: int = STEPS, total: int = N) -> list:
    """Return what each of eight workers draws, batch by batch."""
    combination = Combination(ShardReading(reading), Setting(setting))
    return [
        list(
            islice(
                draw_batches(
                    combination,
                    num_samples=total,
                    batch_size=BATCH,
                    rank=rank,
                    num_workers=W,
                    seed=seed,
                ),
                steps,
            )
        )
        for rank in range(W)
    ]


def flat(batches: list[list[int]]) -> list[int]:
    return [position for batch in batches for position in batch]


def distinct(workers: list[list[list[int]]]) -> int:
    return len({position for batches in workers for position in flat(batches)})


def groups(workers: list[list[list[int]]]) -> list[int]:
    """Return how many workers draw exactly the same, largest group first."""
    return sorted(Counter(tuple(flat(batches)) for batches in workers).values(), reverse=True)


@pytest.mark.parametrize(
    ("reading", "setting", "sizes"),
    [
        ("replicated", "s1-1", [8]),
        ("replicated", "s1-2", [7, 1]),
        ("replicated", "s1-3", [1] * 8),
        ("sharded", "s1-1", [1] * 8),
        ("sharded", "s1-2", [1] * 8),
        ("sharded", "s1-3", [1] * 8),
    ],
)
def test_who_draws_the_same(reading: str, setting: str, sizes: list[int]) -> None:
    assert groups(draw(reading, setting)) == sizes


@pytest.mark.parametrize("reading", ["replicated", "sharded"])
@pytest.mark.parametrize("setting", ["s1-1", "s1-2", "s1-3"])
def test_a_worker_never_repeats_a_sample_within_an_epoch(reading: str, setting: str) -> None:
    for batches in draw(reading, setting):
        assert len(batches) == STEPS
        assert {len(batch) for batch in batches} == {BATCH}
        assert len(set(flat(batches))) == DRAWN
        assert set(flat(batches)) <= set(range(N))


CHANCE = DRAWN / N
"""Chance that a worker with a shuffle of its own draws a certain sample."""


@pytest.mark.parametrize(
    ("reading", "setting", "expected"),
    [
        ("replicated", "s1-2", N * (1 - (1 - CHANCE) ** 2)),
        ("replicated", "s1-3", N * (1 - (1 - CHANCE) ** W)),
        ("sharded", "s1-2", (W - 1) * DRAWN + DRAWN * (1 - (W - 1) * CHANCE)),
        ("sharded", "s1-3", N * (1 - (1 - CHANCE) ** W)),
    ],
)
def test_different_seeds_draw_as_many_distinct_samples_as_chance_gives(
    reading: str, setting: str, expected: float
) -> None:
    counts = [distinct(draw(reading, setting, seed=seed)) for seed in range(12)]
    error = np.std(counts, ddof=1) / np.sqrt(len(counts))
    assert abs(np.mean(counts) - expected) < 4 * error
    assert max(counts) < W * DRAWN

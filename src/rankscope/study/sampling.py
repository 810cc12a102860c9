"""Which samples each worker draws, and in which order."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, TensorDataset

from rankscope.errors import UsageError
from rankscope.study.config import Combination, Reading


def draw_batches(
    combination: Combination,
    *,
    num_samples: int,
    batch_size: int,
    rank: int,
    num_workers: int,
    seed: int,
) -> Iterator[list[int]]:
    """Yield batches of positions ``0 … num_samples − 1`` for one worker, epoch after epoch.

    Both readings use torch's own samplers, as training scripts do. Incomplete batches at the end
    of an epoch are dropped.

    Raises:
        UsageError: A worker's share is smaller than one batch.
    """
    own_seed = combination.setting.seed_of(rank, seed)
    positions = TensorDataset(torch.arange(num_samples))
    sharded: DistributedSampler[Any] = DistributedSampler(
        positions, num_workers, rank, shuffle=True, seed=own_seed
    )
    replicated = RandomSampler(positions, generator=torch.Generator().manual_seed(own_seed))
    sampler = sharded if combination.reading is Reading.SHARDED else replicated
    check_enough_samples(combination.reading, num_samples, batch_size, num_workers)
    epoch = 0
    while True:
        sharded.set_epoch(epoch)
        yield from BatchSampler(sampler, batch_size, drop_last=True)
        epoch += 1


def check_enough_samples(
    reading: Reading, num_samples: int, batch_size: int, num_workers: int
) -> None:
    """Raise a UsageError when a worker's share cannot fill one batch."""
    if num_workers > num_samples:
        raise UsageError(
            f"expected at least one sample per worker, got {num_samples} samples for "
            f"{num_workers} workers; use fewer --workers or more data"
        )
    share = num_samples if reading is Reading.REPLICATED else num_samples // num_workers
    if share < batch_size:
        raise UsageError(
            f"expected at least one batch of {batch_size} per worker, got {share} samples each; "
            "use a smaller --batch-size, fewer --workers or more data"
        )

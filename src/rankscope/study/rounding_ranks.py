"""The same trainings over real ranks, where DDP and its backend choose the order of the sums."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel

from rankscope.study.rounding import (
    GrowthOptions,
    Ingredients,
    draw_positions,
    make_optimizer,
)


def train_with_ddp(
    options: GrowthOptions, ingredients: Ingredients, bucket_megabytes: float
) -> NDArray[np.float32]:
    """Train with plain DDP on this rank; every rank of the default group calls it.

    Each rank takes two micro-batches of the same global batches that :func:`run_growth` draws and
    adds them up before the reduction. A ring reduces each part of a bucket in another order of the
    ranks, so the size of the buckets decides the order in which an element is summed.

    Args:
        options: ``options.workers`` must be the number of ranks.
        ingredients: From ``prepare_growth`` with the same options.
        bucket_megabytes: DDP's ``bucket_cap_mb``.

    Returns:
        All parameters after each step, ``[T, P]``.
    """
    rank, accumulation = dist.get_rank(), options.num_micro // dist.get_world_size()
    model = ingredients.make_model()
    ddp: Any = DistributedDataParallel(model, bucket_cap_mb=bucket_megabytes)
    optimizer = make_optimizer(options, model)
    batches = draw_positions(len(ingredients.samples), options.num_micro, options.seed)
    trajectory = []
    for _ in range(options.steps):
        own = next(batches)[rank * accumulation : (rank + 1) * accumulation]
        for micro, position in enumerate(own, start=1):
            inputs, _ = ingredients.samples.collate([position])
            with nullcontext() if micro == accumulation else ddp.no_sync():
                (ddp(**inputs).loss / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        trajectory.append(flat.numpy().copy())
    return np.stack(trajectory)


def distances(first_TP: NDArray[np.float32], second_TP: NDArray[np.float32]) -> list[float]:
    """Return ``|a - b| / |a|`` of all parameters after each step, in float64."""
    a, b = first_TP.astype(np.float64), second_TP.astype(np.float64)
    apart = np.linalg.norm(a - b, axis=1) / np.linalg.norm(a, axis=1)
    return [float(value) for value in apart]

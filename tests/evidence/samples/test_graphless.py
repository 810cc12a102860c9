"""A forward pass that only arms the wrapper's hooks: its inputs are no samples."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from rankscope import Run
from rankscope.bus.evidence import Table
from support.findings import faults
from support.loops import watch
from support.ranks import on_ranks

pytestmark = pytest.mark.ranks

NUM_STEPS = 12
WAYS = ("armed", "armed, all draw the same", "armed, named", "loaded", "loaded, the same rows")


class Scores(nn.Module):
    """Scores pairs of users and items, by a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(32, 4), nn.Embedding(64, 4)

    def loss(self, pairs: torch.Tensor) -> torch.Tensor:
        scores = (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(dim=1)
        return nn.functional.softplus(1 - scores).mean()


def arm(model: Scores, ddp: DistributedDataParallel) -> None:
    """Call the wrapper with a constant, so that its hooks reduce the next backward pass."""
    model.forward = lambda ids: ids
    ddp(torch.zeros(1, dtype=torch.int64))
    del model.forward


def train(rank: int, way: str, run_dir: str | None) -> list[float]:
    torch.manual_seed(0)
    model = Scores()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scope = watch(ddp, optimizer, run_dir=run_dir, canary=False) if run_dir else None
    shard = 0 if "same" in way else rank
    draws = torch.Generator().manual_seed(1 + shard)
    rows = range(8 * NUM_STEPS * shard, 8 * NUM_STEPS * (shard + 1))
    batches = iter(DataLoader(list(range(16 * NUM_STEPS)), 8, sampler=rows))
    for step in range(NUM_STEPS):
        if "loaded" in way:
            next(batches)
        pairs = torch.randint(32, (8, 2), generator=draws)
        if scope is not None and "named" in way:
            scope.batch([100 * step + 10 * rank + n for n in range(8)])
        arm(model, ddp)
        model.loss(pairs).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    if scope is not None:
        scope.close()
    return [p.double().sum().item() for p in model.parameters()]


def train_all(rank: int, folder: str) -> dict[str, Any]:
    return {way: (train(rank, way, None), train(rank, way, f"{folder}/{way}")) for way in WAYS}


trained = on_ranks(train_all, 2)


@pytest.mark.parametrize(
    ("way", "causes", "num_samples"),
    [
        ("armed", set(), 0),
        ("armed, all draw the same", {"data.duplicate_batches"}, 0),
        ("armed, named", set(), 16 * NUM_STEPS),
        ("loaded", set(), 16 * NUM_STEPS),
        ("loaded, the same rows", {"data.duplicate_batches"}, 16 * NUM_STEPS),
    ],
)
def test_what_only_arms_the_hooks_is_no_sample(trained, way, causes, num_samples):
    results, folder = trained
    assert all(plain == watched for plain, watched in (rank[way] for rank in results))
    run = Run.open(folder / way)
    assert {finding.cause for finding in faults(run).values()} == causes
    drawn = run.columns(Table.STEPS, "samples_drawn")["samples_drawn"]
    assert np.nansum(drawn) == num_samples
    assert run.columns(Table.STEPS, "observed")["observed"].all()

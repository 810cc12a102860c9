"""Batches and ids of unusual types on real ranks: recorded or declined, and training goes on."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import Run, Severity
from rankscope.bus.evidence import Table
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS, BATCH = 4, 3


@dataclass
class Example:
    features: Tensor
    name: object


class Opaque:
    __hash__ = None


class AnyInput(nn.Module):
    """A model that takes whatever holds its features."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, batch: Any) -> Tensor:
        return self.linear(features_of(batch)).square().mean()


def features_of(batch: Any) -> Tensor:
    if isinstance(batch, Opaque):
        return torch.ones(BATCH, 2)
    if isinstance(batch, Example):
        return batch.features
    if isinstance(batch, dict):
        return features_of(batch["data"])
    if isinstance(batch, tuple):
        return features_of(batch[1])
    assert isinstance(batch, Tensor)
    return batch


def numbers(rank: int, step: int) -> Tensor:
    return torch.arange(2.0 * BATCH).reshape(BATCH, 2) + 100 * rank + 10 * step


Batch = tuple[Any, Any]  # what enters the model, and the ids that are given

BATCHES: dict[str, Callable[[int, int], Batch]] = {
    "nested": lambda r, t: ({"data": (Opaque(), Example(numbers(r, t), Opaque()))}, None),
    "tuples as ids": lambda r, t: (Opaque(), [("shard", r, t, i) for i in range(BATCH)]),
    "ids that are none": lambda r, t: (numbers(r, t), [Opaque()] * BATCH),
    "nothing to tell apart": lambda r, t: (Opaque(), None),
}
DECLINED = {"ids that are none", "nothing to tell apart"}


def stream(rank: int, kind: str) -> Iterator[Batch]:
    """Yield batches as an iterable data set does: without a length."""
    for step in range(STEPS):
        yield BATCHES[kind](rank, step)


def train(rank: int, kind: str, run_dir: str | None) -> tuple[list[float], list[str]]:
    """Return all parameters at the end, and what the monitor has said."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rankscope").addHandler(handler)
    torch.manual_seed(0)
    model = DistributedDataParallel(AnyInput())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scope = None
    if run_dir is not None:
        scope = rankscope.watch(model, optimizer, run_dir=run_dir, overhead_budget=None)
    for batch, ids in stream(rank, kind):
        if scope is not None and ids is not None:
            scope.batch(ids)
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    if scope is not None:
        scope.close()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist(), said


def train_all(rank: int, folder: str) -> dict[str, list[tuple[list[float], list[str]]]]:
    """Train without and with the monitor."""
    train_on_nothing(rank, f"{folder}/nothing")
    return {
        kind: [train(rank, kind, None), train(rank, kind, f"{folder}/{kind}")] for kind in BATCHES
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    return run_ranks(train_all, 2, str(folder)), folder


@pytest.mark.parametrize("kind", BATCHES)
def test_training_goes_on_with_batches_of_any_structure(trained, kind):
    results = [by_kind[kind] for by_kind in trained[0]]
    table = Run.open(trained[1] / kind).table(Table.WORKERS)
    norms, samples = table["grad_norm"].to_pylist(), table["num_samples"].to_pylist()
    for (plain, _), (watched, _) in results:
        assert watched == plain
    assert len(norms) == 2 * STEPS
    assert np.isfinite(np.array(norms, float)).all()
    assert samples == [0 if kind == "nothing to tell apart" else BATCH] * (2 * STEPS)
    for _, (_, said) in results:
        spoken = [line for line in said if "one id per sample" in line]
        assert len(spoken) == (kind in DECLINED)


def train_on_nothing(rank: int, run_dir: str) -> None:
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.watch(model, optimizer, run_dir=run_dir, overhead_budget=None):
        for step in range(10):
            (0 * model(numbers(rank, step)).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_loss_that_is_multiplied_by_zero_is_found(trained):
    run = Run.open(trained[1] / "nothing")
    [found] = [f for f in run.findings() if f.severity > Severity.NOTE]
    assert (found.cause, found.severity) == ("loss.no_gradient", Severity.WARNING)
    assert (found.ranks, found.first_step) == ((0, 1), 0)

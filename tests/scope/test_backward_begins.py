"""Steps that a backward pass begins, of models in several parts, and of optimizers in turn."""

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import Run
from rankscope.bus.evidence import Table
from support.loops import collect_warnings
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

ROUNDS = 5
Watch = Callable[[Any, Any], Callable[[Tensor], object]]
"""Begins to watch a model and its optimizers, if it is to be watched; returns ``scope.loss``."""

Training = Callable[[Watch], Iterator[tuple[nn.Module, float]]]
"""Yields a model, and the exact norm of a step's local gradient before its backward pass."""


def norm_of(loss: Tensor, *parts: nn.Module) -> float:
    parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
    return math.sqrt(sum(float(each.double().square().sum()) for each in gradients))


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gen = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
        self.dis = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(part.parameters(), 0.01) for part in (self.gen, self.dis)]

    def loss(self, batch: Tensor, *, generates: bool) -> Tensor:
        fake = self.gen(torch.randn(5, 4))
        if generates:
            return bce(self.dis(fake), torch.ones(5, 1))
        real = self.dis(batch)
        return bce(real, torch.ones(5, 1)) + bce(self.dis(fake.detach()), torch.zeros(5, 1))


def turns_of_two_optimizers(watch: Watch) -> Iterator[tuple[nn.Module, float]]:
    """The generator's pass adds to gradients of the discriminator, which are thrown away."""

    class Turn(Gan):
        def forward(self, batch: Tensor, *, generates: bool) -> Tensor:
            return self.loss(batch, generates=generates)

    model = Turn()
    optimizers = model.optimizers()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    give = watch(ddp, optimizers)
    for number in range(2 * ROUNDS):
        generates = number % 2 == 0
        model.gen.requires_grad_(generates)
        loss = ddp(torch.randn(5, 6), generates=generates)
        own = (model.gen, model.dis) if not number else (model.gen if generates else model.dis,)
        optimizers[not generates].zero_grad()
        norm = norm_of(loss, *own)
        give(loss)
        loss.backward()
        optimizers[not generates].step()
        yield ddp, norm


def two_parts_with_an_optimizer_each(watch: Watch) -> Iterator[tuple[nn.Module, float]]:
    """The usual loop of a GAN: one forward pass of the generator serves both."""
    model = Gan()
    gen, dis = DistributedDataParallel(model.gen), DistributedDataParallel(model.dis)
    optimizers = model.optimizers()
    give = watch([gen, dis], optimizers)
    for _ in range(ROUNDS):
        fake = gen(torch.randn(5, 4))
        optimizers[1].zero_grad()
        loss = bce(dis(fake.detach()), torch.zeros(5, 1))
        norm = norm_of(loss, model.dis)
        give(loss)
        loss.backward()
        optimizers[1].step()
        yield model, norm
        optimizers[0].zero_grad()
        loss = bce(dis(fake), torch.ones(5, 1))
        norm = norm_of(loss, model.gen)
        give(loss)
        loss.backward()
        optimizers[0].step()
        yield model, norm


TRAININGS: list[Training] = [
    turns_of_two_optimizers,
    two_parts_with_an_optimizer_each,
]


def train(rank: int, training: Training, run_dir: str | None) -> tuple[list[float], list[Any]]:
    """Return the norms of a training, and its parameters at the end."""
    scopes = []

    def watch(models: Any, optimizers: Any) -> Callable[[Tensor], object]:
        torch.manual_seed(100 + rank)
        if run_dir is None:
            return lambda loss: None
        options: dict[str, Any] = {"overhead_budget": None, "canary": False, "agent": "thread"}
        scopes.append(rankscope.watch(models, optimizers, run_dir=run_dir, **options))
        return scopes[-1].loss

    torch.manual_seed(0)
    steps = list(training(watch))
    for scope in scopes:
        scope.close()
    model = steps[0][0]
    return [norm for _, norm in steps], [p.detach().numpy().tobytes() for p in model.parameters()]


def train_all(rank: int, folder: str) -> dict[str, Any]:
    results = {}
    for training in TRAININGS:
        warnings = collect_warnings()
        _, alone = train(rank, training, None)
        norms, watched = train(rank, training, f"{folder}/{training.__name__}")
        results[training.__name__] = {
            "norms": norms, "same": alone == watched, "warnings": warnings
        }  # fmt: skip
    return results


@pytest.fixture(scope="module")
def trained():
    with tempfile.TemporaryDirectory() as folder:
        yield run_ranks(train_all, 2, folder, timeout=300), Path(folder)


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.__name__)
def test_each_update_is_a_step_with_its_gradient_and_its_loss(trained, training):
    results, folder = trained
    results = [rank[training.__name__] for rank in results]
    assert [rank["warnings"] for rank in results] == [[] for _ in results]
    assert all(rank["same"] for rank in results)
    run = Run.open(folder / training.__name__)
    steps = run.columns(Table.STEPS, "observed", "loss_mean")
    assert steps["observed"].tolist() == [True] * 2 * ROUNDS
    assert np.isfinite(steps["loss_mean"]).all()
    _, norms = run.per_worker("grad_norm")
    expected = np.array([rank["norms"] for rank in results]).T
    np.testing.assert_allclose(norms, expected, rtol=1e-5)
    assert [finding.cause for finding in run.findings() if finding.cause.startswith("sync")] == []

"""Trainings under FSDP2 with three replicas that are watched from end to end."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import rankscope
from rankscope import Run
from rankscope.bus.evidence import Table
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 10
WORKERS = 3
DAMAGED = 1
"""The worker whose optimizer state is changed, where it is, in step 4."""


class Net(nn.Module):
    """A block, a scale and a head of its own root; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Linear(8, 16)
        self.head = nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.block(inputs).relu() * self.scale
        return {"loss": F.cross_entropy(self.head(hidden), labels)}


class Training:
    """A training on one rank.

    Args:
        rank: The rank.
        ignored: Whether FSDP2 leaves the scale alone.
        replicated: Whether ``replicate`` is used in place of ``fully_shard``.
        damaged: Whether a worker's optimizer state is changed.
        attacked: Whether each step asks for the gradient of its inputs first.
    """

    def __init__(
        self,
        rank: int,
        *,
        ignored: bool = False,
        replicated: bool = False,
        damaged: bool = False,
        attacked: bool = False,
    ) -> None:
        self.rank = rank
        self.model: Any = Net()
        self.scale = self.model.scale if ignored else None
        self.damaged, self.attacked = damaged, attacked
        if replicated:
            mesh = init_device_mesh("cpu", (WORKERS,))
            replicate(self.model.block, mesh=mesh)
            replicate(self.model, mesh=mesh)
        else:
            mesh = init_device_mesh("cpu", (WORKERS, 1), mesh_dim_names=("replicas", "shards"))
            fully_shard(self.model.block, mesh=mesh)
            fully_shard(self.model, mesh=mesh, ignored_params={self.scale} if ignored else None)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        inputs = torch.randn(16, 8, generator=generator)
        return inputs, torch.randint(3, (16,), generator=generator)

    def run(self, run_dir: str | None) -> None:
        """Train, recorded in a directory, or alone."""
        with self.watched(run_dir):
            for step in range(STEPS):
                inputs, labels = self.batch(step)
                if self.attacked:
                    inputs = self.attack(inputs, labels)
                self.model(inputs, labels)["loss"].backward()
                if self.damaged and step == 4 and self.rank == DAMAGED:
                    self.optimizer.state[self.model.head.weight]["exp_avg"].mul_(1.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
                if step % 2:
                    self.evaluate(step)

    def watched(self, run_dir: str | None) -> AbstractContextManager[Any]:
        if run_dir is None:
            return nullcontext()
        return rankscope.watch(self.model, self.optimizer, run_dir=run_dir, overhead_budget=None)

    def bits(self) -> list[bytes]:
        """Return this rank's part of the parameters and of the optimizer's state."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.optimizer.param_groups[0]["params"], *states]
        locals_ = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return [t.detach().contiguous().numpy().tobytes() for t in locals_]

    def attack(self, inputs: Tensor, labels: Tensor) -> Tensor:
        attacked = inputs.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(4 * self.model(attacked, labels)["loss"], attacked)
        return inputs + 0.05 * gradient.sign()

    @torch.no_grad()
    def evaluate(self, step: int) -> None:
        """Leave the whole parameters of the root in place of their shards."""
        self.model.eval()
        self.model(*self.batch(step))
        self.model.train()


TRAININGS: dict[str, dict[str, bool]] = {
    "ignored": {"ignored": True},
    "replicated and damaged": {"replicated": True, "damaged": True},
    "attacked": {"attacked": True},
}


def train_all(rank: int, folder: str) -> None:
    for name, how in TRAININGS.items():
        Training(rank, **how).run(f"{folder}/{name}")


def train_alone_and_watched(rank: int, name: str, folder: str) -> list[list[bytes]]:
    trainings = [Training(rank, **TRAININGS[name]) for _ in range(2)]
    for training, run_dir in zip(trainings, (None, folder), strict=True):
        training.run(run_dir)
    return [training.bits() for training in trainings]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp2")


@pytest.fixture(scope="module")
def trained(folder):
    return run_ranks(train_all, WORKERS, str(folder), timeout=400)


def exact_findings(run: Run) -> list[Any]:
    return [f for f in run.findings() if f.cause.startswith(("state.", "sync.", "loss."))]


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("name", ["ignored", "attacked"])
def test_healthy_trainings_have_no_findings_of_exact_evidence(folder, name):
    run = Run.open(folder / name)
    assert exact_findings(run) == []
    steps = run.columns(Table.STEPS, "observed", "grad_norm_reduced")
    assert steps["observed"].tolist() == [True] * STEPS
    assert steps["grad_norm_reduced"].min() > 0
    for kind in ("param", "optimizer", "reduced", "applied"):
        _, digests_TW = run.per_worker(f"{kind}_digest")
        assert digests_TW.shape == (STEPS, WORKERS)
        assert not np.isnan(digests_TW).any()
    _, layouts_TW = run.per_worker("state_layout")
    assert len(np.unique(layouts_TW)) == 1  # whatever hangs in the model when it is listed


def test_a_training_keeps_its_bits(tmp_path):
    for alone, watched in run_ranks(train_alone_and_watched, WORKERS, "attacked", str(tmp_path)):
        assert len(alone) == 5 + 3 * 5  # parameters, and AdamW's two moments and step of each
        assert alone == watched


@pytest.mark.usefixtures("trained")
def test_damaged_optimizer_state_of_the_root_is_found_and_its_worker_named(folder):
    run = Run.open(folder / "replicated and damaged")
    found = {finding.cause: finding for finding in exact_findings(run)}
    assert set(found) == {"state.optimizer_differs", "state.parameters_differ"}
    for finding in found.values():
        assert finding.ranks == (DAMAGED,)
        assert finding.first_step == 4
    assert "head.weight" in str(found["state.optimizer_differs"].evidence)


@pytest.mark.usefixtures("trained")
def test_gradients_for_other_purposes_are_no_part_of_the_training(folder):
    run = Run.open(folder / "attacked")
    for column, expected in (("optimizer_steps", 1), ("grad_scale", 1)):
        _, values_TW = run.per_worker(column)
        assert values_TW.tolist() == [[expected] * WORKERS] * STEPS
    _, samples_TW = run.per_worker("num_samples")
    assert samples_TW.tolist() == [[16] * WORKERS] * STEPS

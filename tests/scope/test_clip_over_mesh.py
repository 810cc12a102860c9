"""Gradients of a model under FSDP2 and tensor parallelism, clipped by code of the training."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rankscope import Run
from rankscope.verdict.diagnosis import diagnose_run
from support.loops import watch
from support.ranks import on_ranks

pytestmark = pytest.mark.ranks

STEPS, WIDTH, LIMIT = 12, 8, 0.01


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def clip(model, mesh, *, twice: bool) -> None:
    """Clip by the norm over both axes; ``twice`` counts what ranks along tp hold alike for each."""
    total = torch.zeros(())
    for parameter in model.parameters():
        names, placements = parameter.device_mesh.mesh_dim_names, parameter.placements
        cut = "tp" in names and isinstance(placements[names.index("tp")], Shard)
        square = parameter.grad.to_local().square().sum()
        total += square if cut or twice else square / mesh["tp"].size()
    dist.all_reduce(total)
    for parameter in model.parameters():
        parameter.grad.to_local().mul_(min(1.0, LIMIT / float(total.sqrt())))


def train(rank: int, run_dir: str, twice: bool, same_data: bool = False) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))
    parallelize_module(model[0], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model[0], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watch(model, optimizer, run_dir=run_dir, canary=False)
    for step in range(STEPS):
        torch.manual_seed(2 * step + (0 if same_data else mesh["dp"].get_local_rank()))
        batch = torch.randn(4, WIDTH)
        loss = (model(batch) - batch.flip(1)).square().mean()
        scope.loss(loss)
        loss.backward()
        clip(model, mesh, twice=twice)
        optimizer.step()
        optimizer.zero_grad()
    scope.close()


def train_all(rank: int, folder: str) -> None:
    train(rank, f"{folder}/twice/run", True)
    train(rank, f"{folder}/once/run", False, same_data=True)


trained = on_ranks(train_all, 4)


@pytest.mark.parametrize("name", ["twice", "once"])
def test_a_norm_over_a_mesh_is_found_only_if_it_is_wrong(trained: Any, name: str) -> None:
    runs = (Run.open(path) for path in (trained[1] / name).iterdir())
    found = {f.id: f for run in runs for f in run.findings()}
    if name == "once":
        assert not any(finding.cause == "sync.clip_norm" for finding in found.values())
        return
    finding = found["clip-norm-over-mesh:tp"]
    assert finding.cause == "sync.clip_norm"
    assert "all ranks along tp hold alike count once for each of these ranks" in finding.explanation
    assert finding.evidence["norm"] == pytest.approx(LIMIT, rel=1e-4)


def test_workers_are_named_by_their_ranks_in_the_job(trained: Any) -> None:
    for name, words in {"run": "Ranks 0 and 2 ", "run-from-rank-1": "Ranks 1 and 3 "}.items():
        run = Run.open(trained[1] / "once" / name)
        for findings in (run.findings(), diagnose_run(run)):
            [found] = [one for one in findings if one.id == "data.duplicate_batches"]
            assert found.explanation.startswith(words)
            assert found.ranks == (0, 1)

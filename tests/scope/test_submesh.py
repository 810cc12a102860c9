"""A mesh of 2 x 2 ranks in which only the data-parallel dimension is compared."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import Run
from rankscope.bus.evidence import Table
from support.loops import collect_warnings
from support.models import make_batch, make_model
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 4


def train(rank: int, run_dir: str | None, *, by_numpy: bool = False) -> dict[str, Any]:
    """Train two models side by side, one per column of the mesh, on two ranks each.

    ``by_numpy``: whether the groups of the columns are made of numpy's numbers.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    warnings = collect_warnings()
    model = make_model(seed=mesh["tp"].get_local_rank(), dropout=0.0)
    group = mesh["dp"].get_group()
    if by_numpy:
        group = [dist.new_group(column) for column in np.arange(4).reshape(2, 2).T][rank % 2]
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scope = run_dir and rankscope.watch(ddp, optimizer, run_dir=run_dir, overhead_budget=None)
    losses, written = [], None
    for step in range(STEPS):
        loss = ddp(**make_batch(rank, step))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if scope:
        scope.close()
        written = str(scope.run_dir) if scope.run_dir else None
    assert warnings == []
    bits = [value.numpy().tobytes() for value in model.state_dict().values()]
    return {"losses": losses, "bits": bits, "written": written}


def train_twice(rank: int, folder: str) -> list[dict[str, Any]]:
    other = train(rank, f"{folder}/other/run", by_numpy=True)
    return [train(rank, None), train(rank, f"{folder}/run"), other]


def test_each_data_parallel_group_compares_its_own_ranks(tmp_path):
    results = run_ranks(train_twice, 4, str(tmp_path))
    for alone, *watched in results:
        assert all(twin["bits"] == alone["bits"] for twin in watched)
    for number, parent in ((1, tmp_path), (2, tmp_path / "other")):
        assert [rank[number]["written"] for rank in results] == [
            *(str(parent / "run"), str(parent / "run-from-rank-1"), None, None)
        ]
        for name, ranks in (("run", (0, 2)), ("run-from-rank-1", (1, 3))):
            run = Run.open(parent / name)
            assert run.status == "complete"
            assert run.num_workers == 2
            _, losses_TW = run.per_worker("loss")
            expected = np.array([results[rank][0]["losses"] for rank in ranks]).T
            np.testing.assert_allclose(losses_TW, expected, rtol=1e-6)
            assert run.columns(Table.STEPS, "observed")["observed"].all()
            residual = run.columns(Table.STEPS, "grad_norm_reduced", "grad_norm_mean")
            assert (residual["grad_norm_reduced"] < residual["grad_norm_mean"]).all()

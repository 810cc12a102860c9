"""Replicas over the other axes of a mesh: eight ranks, two along each of three axes."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.faults.mesh_faults import SequenceParallelNorm, sum_parts
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rankscope import Run
from rankscope.session import meetings, opening, start
from support.loops import collect_warnings, watch
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS, LATE, WIDTH = 4, 2, 16
NORMS = [f"{block}.norm.norm.{name}" for block in (0, 1) for name in ("weight", "bias")]

CASES: dict[str, dict[str, Any]] = {
    "healthy": {"noise": 1e-6},
    "losses are not averaged": {"forgets": "cp"},
    "replicas of other seeds": {"seeds": True},
    "norms are not summed any more on two hosts": {"forgets": "tp", "hosts": True, "since": LATE},
    "one group is watched": {"forgets": "tp", "alone": True},  # last: others do not count it
}
"""What is done: which axis's gradients are forgotten and since which step, whether a layer begins
with another seed on each rank along ``tp``, by how much a gradient is changed there; whether half
of the ranks take themselves for another host's, and whether one group alone is watched."""


class Block(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.norm = SequenceParallelNorm(nn.LayerNorm(WIDTH), mesh.get_group())
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        parallelize_module(self, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = hidden + self.down(self.up(self.norm(hidden)).relu())
        return added


@functools.cache
def mesh_of_all() -> DeviceMesh:
    """Return the mesh of all trainings: it costs more than some of their steps."""
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))


def train(run_dir: str | None, case: dict[str, Any]) -> list[bytes]:
    mesh = mesh_of_all()
    torch.manual_seed(0)
    model = nn.Sequential(Block(mesh["tp"]), Block(mesh["tp"]), nn.Linear(WIDTH, WIDTH))
    if case.get("seeds"):
        torch.manual_seed(mesh["tp"].get_local_rank())
        model[2].reset_parameters()
    data = mesh["dp"]
    for part in model:
        fully_shard(part, mesh=data)
    fully_shard(model, mesh=data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watched = run_dir and not (case.get("alone") and dist.get_rank() % 4)
    scope = watched and watch(model, optimizer, run_dir=run_dir, canary=False)
    tp, cp = mesh["tp"].get_group(), mesh["cp"].get_group()
    worker = dist.get_rank() // 4
    for step in range(STEPS):
        torch.manual_seed(100 * step + worker)
        batch = torch.randn(3, 8, WIDTH)
        given = batch.chunk(2, dim=1)[cp.rank()]
        (model(given) - given.roll(1, -1)).square().mean().backward()
        forgotten = case.get("forgets") if step >= case.get("since", 0) else None
        if forgotten != "tp":
            sum_parts(model, ("norm",), tp)
        if forgotten != "cp":
            sum_parts(model, ("",), cp, mean=True)
        if "noise" in case and tp.rank():  # rounding
            model[2].weight.grad.to_local().mul_(1 + case["noise"])
        optimizer.step()
        optimizer.zero_grad()
    if scope:
        scope.close()
    return [parameter.to_local().detach().numpy().tobytes() for parameter in model.parameters()]


def train_all(rank: int, folder: str) -> dict[str, Any]:
    warnings = collect_warnings()
    alone = train(None, CASES["healthy"])
    bits = {}
    for name, case in CASES.items():
        with pytest.MonkeyPatch.context() as patch:
            if case.get("hosts"):
                for module in (opening, start):
                    patch.setattr(module, "host_name", lambda: f"host {rank // 4}")
            if case.get("alone"):
                patch.setattr(meetings, "PATIENCE_SECONDS", 0.5)
            bits[name] = train(f"{folder}/{name}/run", case)
    return {"same": bits["healthy"] == alone, "warnings": warnings}


@pytest.fixture(scope="module", autouse=True)
def trained(folder):
    for result in run_ranks(train_all, 8, str(folder), timeout=240):
        assert result == {"same": True, "warnings": []}


def faults(folder: Path, case: str) -> dict[str, Any]:
    """Return what one run of a case says of the axes, by id; none says anything else."""
    found = {}
    for path in sorted((folder / case).iterdir()):
        run = Run.open(path)
        assert run.status == "complete"
        assert run.num_workers == 2
        for finding in run.findings():
            if finding.cause == "sync.part_of_ranks":  # of each run that has a copy of the model
                assert case == "losses are not averaged"
                continue
            about_axes = finding.cause in ("sync.partial_gradient", "state.replicas_differ")
            assert about_axes or str(finding.severity) == "note", finding
            assert not about_axes or path.name == "run"
            if about_axes:
                found[finding.id] = finding
    return found


@pytest.mark.parametrize("case", ["healthy", "one group is watched"])
def test_replicas_that_agree_or_are_not_known_are_not_mentioned(folder, case):
    assert faults(folder, case) == {}


def test_a_gradient_that_is_partial_over_tp_is_found(folder):
    found = faults(folder, "norms are not summed any more on two hosts")
    assert list(found) == ["sync.partial_gradient:tp"]
    [finding] = found.values()
    assert str(finding.severity) == "error"
    assert finding.first_step == LATE
    assert sorted(finding.evidence["parameters"]) == sorted(NORMS)
    assert finding.evidence["lines"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert "partial over the mesh axis tp" in finding.explanation


def test_a_gradient_that_is_partial_over_cp_is_found(folder):
    found = faults(folder, "losses are not averaged")
    assert list(found) == ["sync.partial_gradient:cp"]
    [finding] = found.values()
    assert finding.first_step == 0
    assert finding.evidence["lines"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert {*NORMS, "0.up.weight", "1.down.bias", "2.weight"} <= {*finding.evidence["parameters"]}


def test_replicas_that_begin_with_other_values_are_found(folder):
    found = faults(folder, "replicas of other seeds")
    assert list(found) == ["state.replicas_differ:tp"]
    [finding] = found.values()
    assert (str(finding.severity), finding.first_step) == ("error", 0)
    assert finding.evidence["parameters"] == ["2.weight", "2.bias"]

"""Experts on another mesh than the rest: eight workers, whose experts are cut over ``ep``."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from benchmarks.faults.mesh_faults import exchange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import rankscope
from rankscope import Run
from rankscope.bus.evidence import Table
from rankscope.errors import UnsupportedError
from support.findings import faults
from support.loops import collect_lines, collect_warnings, watch
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS, WIDTH, EXPERTS, RANKS = 4, 8, 8, 8

CASES: dict[str, dict[str, Any]] = {
    "hybrid": {"hybrid": True},
    "experts are divided by their own mesh": {"factor": None},
}
"""What is done: whether parameters are replicated as well, what FSDP2 is told to divide experts'
gradients by (by default the number of all workers)."""


class Experts(nn.Module):
    """Experts, of which a rank has some, for the tokens of all ranks along ``ep``; None: all."""

    def __init__(self, ep: DeviceMesh | None) -> None:
        super().__init__()
        whole = torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5
        self.weight = nn.Parameter(
            whole if ep is None else distribute_tensor(whole, ep, [Shard(0)])
        )
        self._group = None if ep is None else ep.get_group()

    def forward(self, hidden: Tensor, shares: Tensor) -> Tensor:
        group = self._group
        if group is None:
            each = torch.einsum("bld,edf->blef", hidden, self.weight).tanh()
            return (each * shares[..., None]).sum(2)
        hidden, shares = (exchange(x, group, _all, _own_sum) for x in (hidden, shares))
        own = shares.chunk(group.size(), -1)[group.rank()]
        each = torch.einsum("bld,edf->blef", hidden, self.weight.to_local()).tanh()
        return exchange((each * own[..., None]).sum(2), group, _own_sum, _all)


def _all(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [
        torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts)


def _own_sum(given: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = given.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.chunk(group.size())[group.rank()].contiguous()


class Model(nn.Module):
    def __init__(self, ep: DeviceMesh | None) -> None:
        super().__init__()
        self.up, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList([Experts(ep), Experts(ep)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Tensor) -> Tensor:
        hidden = self.up(given)
        for experts in self.experts:
            hidden = hidden + experts(hidden, self.router(hidden).softmax(-1))
        returned: Tensor = self.head(hidden)
        return returned


def batch_of(worker: int, step: int) -> Tensor:
    return torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(100 * step + worker))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.roll(1, -1)).square().mean()


@functools.cache
def meshes(*, hybrid: bool) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    """Return the mesh of all but experts, that of experts, and what these are sharded over."""
    if hybrid:
        dense = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        sparse = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "efsdp", "ep"))
        over = sparse["replicate", "efsdp"]
    else:
        dense = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
        sparse = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("efsdp", "ep"))
        over = sparse["efsdp"]
    return dense, sparse, over


@functools.cache
def own_group(*, hybrid: bool) -> dist.ProcessGroup:
    """Return the group of the ranks that hold the same experts."""
    ranks = meshes(hybrid=hybrid)[-1].mesh.flatten().tolist()
    return dist.new_group(ranks, use_local_synchronization=True)


def build(case: dict[str, Any]) -> Model:
    dense, sparse, over = meshes(hybrid=case.get("hybrid", False))
    torch.manual_seed(0)
    model = Model(sparse["ep"])
    factor = case.get("factor", RANKS)
    for experts in model.experts:
        fully_shard(experts, mesh=over)
        if factor is not None:
            experts.set_gradient_divide_factor(factor)
            experts.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing
    fully_shard(model, mesh=dense)
    return model


def train(folder: Path | None, case: dict[str, Any]) -> list[bytes]:
    """Train a model, watched twice or not at all; return its bits."""
    model = build(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scopes = []
    if folder is not None:
        group = own_group(hybrid=case.get("hybrid", False))
        scopes = [
            watch(model, optimizer, run_dir=folder / name, process_group=own, verify_at=[1])
            for name, own in (("run", None), ("experts", group))
        ]
    rank = dist.get_rank()
    for step in range(STEPS):
        loss_of(model, batch_of(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for scope in reversed(scopes):
        scope.close()
    return [parameter.to_local().detach().numpy().tobytes() for parameter in model.parameters()]


def train_all(rank: int, folder: str) -> dict[str, Any]:
    collect_warnings()
    said = collect_lines()
    results: dict[str, Any] = {"refused": refusal()}
    for name, case in CASES.items():
        said.clear()
        bits = train(Path(folder) / name, case)
        results[name] = [line for line in said if "gradients" in line or "metrics" in line]
        if name == "hybrid":
            results["same"] = bits == train(None, case)
    return results


def refusal() -> str:
    model = build({})
    pair, _ = dist.new_subgroups(2)
    with pytest.raises(UnsupportedError) as refused:
        rankscope.watch(model, run_dir="nowhere", process_group=pair)
    return str(refused.value)


@pytest.fixture(scope="module")
def results(folder):
    return run_ranks(train_all, RANKS, str(folder), timeout=400)


def test_the_training_computes_the_same_bits(results):
    assert [result["same"] for result in results] == [True] * RANKS


def test_workers_are_those_of_the_largest_mesh(folder, results):
    run = Run.open(folder / "hybrid" / "run")
    assert (run.status, run.num_workers, faults(run)) == ("complete", RANKS, {})
    assert run.columns(Table.STEPS, "observed")["observed"].all()
    _, norms_TW = run.per_worker("grad_norm")
    torch.manual_seed(0)
    plain = Model(None)
    for worker in range(RANKS):
        plain.zero_grad()
        loss_of(plain, batch_of(worker, 0)).backward()
        dense = [p.grad for name, p in plain.named_parameters() if "experts" not in name]
        exact = float(torch.cat([g.double().flatten() for g in dense]).norm())
        np.testing.assert_allclose(norms_TW[0, worker], exact, rtol=1e-5)


def test_experts_are_compared_among_the_ranks_that_hold_the_same(folder, results):
    torch.manual_seed(0)
    plain = Model(None)
    for ep, name in enumerate(("experts", "experts-from-rank-1")):
        run = Run.open(folder / "hybrid" / name)
        assert (run.status, run.num_workers, faults(run)) == ("complete", RANKS // 2, {})
        assert run.columns(Table.STEPS, "observed")["observed"].all()
        _, norms_TW = run.per_worker("grad_norm")
        for worker in range(RANKS // 2):
            plain.zero_grad()
            for rank in (2 * worker, 2 * worker + 1):  # whose tokens a rank's experts see
                loss_of(plain, batch_of(rank, 0)).backward()
            held = [experts.weight.grad.double().chunk(2)[ep] for experts in plain.experts]
            exact = float(torch.cat(held).norm())
            np.testing.assert_allclose(norms_TW[0, worker], exact, rtol=1e-5)
        found = run.columns(Table.STEPS, "reduction_residual")["reduction_residual"]
        assert np.nanmax(found) < 1e-5


def test_no_worker_computes_a_gradient_again_alone(folder, results):
    found = Run.open(folder / "hybrid" / "run").findings()
    assert {str(each.severity) for each in found} == {"note"}
    [note] = [each for each in found if not each.cause.startswith("update.")]
    assert note.cause == "verify.declined"
    assert "experts lie on another mesh" in note.explanation


def test_it_is_said_what_the_metrics_leave_out(results):
    for result in results:
        [said] = result["hybrid"]
        assert said.startswith(
            "2 parameters (from experts.0.weight on) are reduced over 4 ranks, the rest over 8"
        )


def test_a_divisor_that_does_not_fit_is_found(folder, results):
    found = faults(Run.open(folder / "experts are divided by their own mesh" / "run"))
    assert set(found) == {"sync.expert_divisor"}
    [finding] = found.values()
    assert "experts.0.weight and experts.1.weight are 2 times too large" in finding.explanation
    assert "set_gradient_divide_factor(8)" in finding.next_check


def test_a_group_of_other_ranks_is_refused(results):
    for rank, result in enumerate(results):
        first = rank - rank % 2
        assert f"got 2 ranks from {first} to {first + 1}; pass" in result["refused"]

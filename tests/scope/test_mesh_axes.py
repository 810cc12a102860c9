import functools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from benchmarks.faults.mesh_faults import SequenceParallelNorm, exchange, sum_parts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rankscope
from rankscope import Run
from rankscope.bus.evidence import Table
from rankscope.errors import UnsupportedError
from rankscope.session import meetings, opening, start
from support.findings import faults
from support.fsdp2_modes import Block
from support.loops import bits_of, collect_lines, collect_warnings, train_watched, watch
from support.ranks import on_ranks

pytestmark = pytest.mark.ranks
STEPS, LATE, WIDTH, EXPERTS, RANKS = 4, 2, 8, 8, 8
NORMS = [f"{block}.norm.norm.{name}" for block in (0, 1) for name in ("weight", "bias")]

CASES = {
    "healthy": {"noise": 1e-6},
    "losses are not averaged": {"forgets": "cp"},
    "replicas of other seeds": {"seeds": True},
    "norms are not summed any more on two hosts": {"forgets": "tp", "hosts": True, "since": LATE},
    "one group is watched": {"forgets": "tp", "alone": True},  # last: others do not count it
}
"""What is done: which axis's gradients are forgotten and since which step, whether a layer begins
with another seed on each rank along ``tp``, by how much a gradient is changed there; whether half
of the ranks take themselves for another host's, and whether one group alone is watched."""


def make_block(mesh):
    block = Block(WIDTH)
    block.norm = SequenceParallelNorm(block.norm, mesh.get_group())
    return parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@functools.cache
def mesh_of_all():
    """Return the mesh of all trainings: it costs more than some of their steps."""
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))


def train(run_dir, case):
    mesh = mesh_of_all()
    torch.manual_seed(0)
    model = nn.Sequential(*(make_block(mesh["tp"]) for _ in "ab"), nn.Linear(WIDTH, WIDTH))
    if case.get("seeds"):
        torch.manual_seed(mesh["tp"].get_local_rank())
        model[2].reset_parameters()
    for part in (*model, model):
        fully_shard(part, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tp, cp = mesh["tp"].get_group(), mesh["cp"].get_group()

    def loss_of_part(step):
        torch.manual_seed(100 * step + dist.get_rank() // 4)
        return loss_of(model, torch.randn(3, 8, WIDTH).chunk(2, dim=1)[cp.rank()])

    def sum_all(step):
        forgotten = case.get("forgets") if step >= case.get("since", 0) else None
        if forgotten != "tp":
            sum_parts(model, ("norm",), tp)
        if forgotten != "cp":
            sum_parts(model, ("",), cp, mean=True)
        if "noise" in case and tp.rank():  # rounding
            model[2].weight.grad.to_local().mul_(1 + case["noise"])

    run_dir = None if case.get("alone") and dist.get_rank() % 4 else run_dir
    train_watched(model, optimizer, run_dir, STEPS, loss_of_part, sum_all)
    return bits_of(model)


def train_all(rank, folder):
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
    assert (bits["healthy"], warnings) == (alone, [])


trained = on_ranks(train_all, RANKS, timeout=400.0)


def faults_of(trained, case):
    """Return what one run of a case says of the axes, by id; none says anything else."""
    found = {}
    for path in sorted((trained[1] / case).iterdir()):
        run = Run.open(path)
        assert (run.status, run.num_workers) == ("complete", 2)
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
def test_replicas_that_agree_or_are_not_known_are_not_mentioned(trained, case):
    assert faults_of(trained, case) == {}


def test_a_gradient_that_is_partial_over_tp_is_found(trained):
    found = faults_of(trained, "norms are not summed any more on two hosts")
    assert list(found) == ["sync.partial_gradient:tp"]
    [finding] = found.values()
    assert str(finding.severity) == "error"
    assert finding.first_step == LATE
    assert sorted(finding.evidence["parameters"]) == sorted(NORMS)
    assert finding.evidence["lines"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert "partial over the mesh axis tp" in finding.explanation


def test_a_gradient_that_is_partial_over_cp_is_found(trained):
    found = faults_of(trained, "losses are not averaged")
    assert list(found) == ["sync.partial_gradient:cp"]
    [finding] = found.values()
    assert finding.first_step == 0
    assert finding.evidence["lines"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert {*NORMS, "0.up.weight", "1.up.bias", "2.weight"} <= {*finding.evidence["parameters"]}


def test_replicas_that_begin_with_other_values_are_found(trained):
    found = faults_of(trained, "replicas of other seeds")
    assert list(found) == ["state.replicas_differ:tp"]
    [finding] = found.values()
    assert (str(finding.severity), finding.first_step) == ("error", 0)
    assert finding.evidence["parameters"] == ["2.weight", "2.bias"]


# Experts on another mesh than the rest ----------------------------------------------------------

EXPERT_CASES = {
    "hybrid": {"hybrid": True},
    "experts are divided by their own mesh": {"factor": None},
}
"""What is done: whether parameters are replicated as well, what FSDP2 is told to divide experts'
gradients by (by default the number of all workers)."""


class Experts(nn.Module):
    """Experts, of which a rank has some, for the tokens of all ranks along ``ep``; None: all."""

    def __init__(self, ep):
        super().__init__()
        whole = torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5
        own = whole if ep is None else distribute_tensor(whole, ep, [Shard(0)])
        self.weight = nn.Parameter(own)
        self._group = None if ep is None else ep.get_group()

    def forward(self, hidden, shares):
        group = self._group
        if group is None:
            each = torch.einsum("bld,edf->blef", hidden, self.weight).tanh()
            return (each * shares[..., None]).sum(2)
        hidden, shares = (exchange(x, group, _all, _own_sum) for x in (hidden, shares))
        own = shares.chunk(group.size(), -1)[group.rank()]
        each = torch.einsum("bld,edf->blef", hidden, self.weight.to_local()).tanh()
        return exchange((each * own[..., None]).sum(2), group, _own_sum, _all)


def _all(own, group):
    own = own.contiguous()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts)


def _own_sum(given, group):
    total = given.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.chunk(group.size())[group.rank()].contiguous()


class Model(nn.Module):
    def __init__(self, ep):
        super().__init__()
        self.up, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList([Experts(ep), Experts(ep)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, given):
        hidden = self.up(given)
        for experts in self.experts:
            hidden = hidden + experts(hidden, self.router(hidden).softmax(-1))
        return self.head(hidden)


def batch_of(worker, step):
    return torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(100 * step + worker))


def loss_of(model, batch):
    return (model(batch) - batch.roll(1, -1)).square().mean()


@functools.cache
def meshes(*, hybrid):
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
def own_group(*, hybrid):
    """Return the group of the ranks that hold the same experts."""
    ranks = meshes(hybrid=hybrid)[-1].mesh.flatten().tolist()
    return dist.new_group(ranks, use_local_synchronization=True)


def build(case):
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


def train_experts(folder, case):
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
    return bits_of(model)


def train_all_experts(rank, folder):
    collect_warnings()
    said, results = collect_lines(), {"refused": refusal()}
    for name, case in EXPERT_CASES.items():
        said.clear()
        bits = train_experts(Path(folder) / name, case)
        results[name] = [line for line in said if "gradients" in line or "metrics" in line]
        if name == "hybrid":
            results["same"] = bits == train_experts(None, case)
    return results


def refusal():
    model = build({})
    pair, _ = dist.new_subgroups(2)
    with pytest.raises(UnsupportedError) as refused:
        rankscope.watch(model, run_dir="nowhere", process_group=pair)
    return str(refused.value)


experts = on_ranks(train_all_experts, RANKS, timeout=400.0)


def test_the_training_computes_the_same_bits(experts):
    assert [result["same"] for result in experts[0]] == [True] * RANKS


def test_workers_are_those_of_the_largest_mesh(experts):
    run = Run.open(experts[1] / "hybrid" / "run")
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


def test_experts_are_compared_among_the_ranks_that_hold_the_same(experts):
    torch.manual_seed(0)
    plain = Model(None)
    for ep, name in enumerate(("experts", "experts-from-rank-1")):
        run = Run.open(experts[1] / "hybrid" / name)
        assert (run.status, run.num_workers, faults(run)) == ("complete", RANKS // 2, {})
        assert run.columns(Table.STEPS, "observed")["observed"].all()
        _, norms_TW = run.per_worker("grad_norm")
        for worker in range(RANKS // 2):
            plain.zero_grad()
            for rank in (2 * worker, 2 * worker + 1):  # whose tokens a rank's experts see
                loss_of(plain, batch_of(rank, 0)).backward()
            held = [each.weight.grad.double().chunk(2)[ep] for each in plain.experts]
            exact = float(torch.cat(held).norm())
            np.testing.assert_allclose(norms_TW[0, worker], exact, rtol=1e-5)
        found = run.columns(Table.STEPS, "reduction_residual")["reduction_residual"]
        assert np.nanmax(found) < 1e-5


def test_no_worker_computes_a_gradient_again_alone(experts):
    found = Run.open(experts[1] / "hybrid" / "run").findings()
    assert {str(each.severity) for each in found} == {"note"}
    [note] = [each for each in found if not each.cause.startswith("update.")]
    assert note.cause == "verify.declined"
    assert "experts lie on another mesh" in note.explanation


def test_it_is_said_what_the_metrics_leave_out(experts):
    for result in experts[0]:
        [said] = result["hybrid"]
        assert said.startswith(
            "2 parameters (from experts.0.weight on) are reduced over 4 ranks, the rest over 8"
        )


def test_a_divisor_that_does_not_fit_is_found(experts):
    found = faults(Run.open(experts[1] / "experts are divided by their own mesh" / "run"))
    assert set(found) == {"sync.expert_divisor"}
    [finding] = found.values()
    assert "experts.0.weight and experts.1.weight are 2 times too large" in finding.explanation
    assert "set_gradient_divide_factor(8)" in finding.next_check


def test_a_group_of_other_ranks_is_refused(experts):
    for rank, result in enumerate(experts[0]):
        first = rank - rank % 2
        assert f"got 2 ranks from {first} to {first + 1}; pass" in result["refused"]

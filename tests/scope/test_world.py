import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from benchmarks.faults.mesh_faults import exchange
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import Run
from rankscope.bus.evidence import Table
from support.findings import faults
from support.loops import collect_warnings, watch
from support.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.ranks
RANKS, STEPS, VOCABULARY, LENGTH, ROWS = 4, 6, 12, 8, 3

CASES = {
    "DDP over a pair": {},
    "FSDP2 over a pair": {"sharded": True},
    "averaged by hand": {"averages": True},
    "other seeds": {"model_seeds": True},
    "declared": {"plan": {"independent": True}},
    "labels of cp": {"axis": "cp", "shifted_inside": True},
    "labels of cp are whole": {"axis": "cp"},
    "one pair is watched": {"alone": True},  # last: others do not count it
}
WRONG = ("DDP over a pair", "FSDP2 over a pair", "labels of cp")


@functools.cache
def pairs():
    """Return the group of this rank's pair, and a mesh of it that knows no other ranks."""
    groups = [dist.new_group(ranks) for ranks in np.arange(4).reshape(2, 2)]  # of numpy's numbers
    own = groups[dist.get_rank() // 2]
    return own, DeviceMesh.from_group(own, "cpu", mesh_dim_names=("shard",))


@functools.cache
def mesh_of(axis):
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", axis))


def train(folder, case):
    rank = dist.get_rank()
    group, pair = pairs()
    axis = case.get("axis")
    torch.manual_seed(rank // 2 if case.get("model_seeds") else 0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))
    if axis or case.get("sharded"):
        fully_shard(model, mesh=mesh_of(axis)["dp"] if axis else pair)
    else:
        model = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run_dir = f"{folder}/run" if folder and not (case.get("alone") and rank > 1) else None
    worker, losses = rank // 2 if axis else rank, []
    with watch(model, optimizer, run_dir=run_dir, canary=False, plan=case.get("plan")) as scope:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(10 * step + worker)
            ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
            given, labels = ids[:, :-1], ids[:, 1:]
            if axis == "cp":
                half = slice(rank % 2 * LENGTH // 2, (rank % 2 + 1) * LENGTH // 2)
                given, labels = given[:, half], labels[:, half]
            logits = model(given)
            if case.get("shifted_inside"):
                logits, labels = logits[:, :-1], labels[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            if scope:
                scope.loss(loss.detach(), weight=labels.numel())
            losses.append(loss.item())
            loss.backward()
            for parameter in model.parameters() if case.get("averages") or axis == "cp" else ():
                local = parameter.grad if axis is None else parameter.grad.to_local()
                dist.all_reduce(local, group=mesh_of(axis)[axis].get_group() if axis else None)
                local.div_(RANKS if axis is None else 2)
                local.mul_(2 if axis is None else 1)
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()  # each pair reads what the other has published
    return {
        "bits": [p.tolist() for p in model.parameters() if not isinstance(p, DTensor)],
        "losses": losses,
        "run_dir": scope and str(scope.run_dir),
    }


def train_another_model(folder):
    """Train another model on the first pair alone, watched: what follows is its second run."""
    group, _ = pairs()
    model = DistributedDataParallel(nn.Linear(VOCABULARY, 1), process_group=group)
    run_dir = folder if dist.get_rank() < 2 else None
    with watch(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=run_dir, canary=False):
        model(torch.ones(ROWS, VOCABULARY)).mean().backward()


def train_all(rank, folder):
    warnings = collect_warnings()
    train_another_model(f"{folder}/of another model")
    alone = train(None, {})
    pair, *_ = [train(f"{folder}/{name}", case) for name, case in CASES.items()]
    assert (pair["bits"], warnings) == (alone["bits"], [])
    return pair


trained = on_ranks(train_all, RANKS, timeout=240.0)


def test_each_pair_compares_its_own_ranks_in_a_run_of_its_own(trained):
    ranks, folder = trained
    for first, name in ((0, "run"), (2, "run-from-rank-2")):
        run, own = Run.open(folder / "DDP over a pair" / name), ranks[first : first + 2]
        assert [rank["run_dir"] for rank in own] == [str(run.path), "None"]
        assert run.num_workers == 2
        losses_TW = np.transpose([rank["losses"] for rank in own])
        np.testing.assert_allclose(run.per_worker("loss")[1], losses_TW, rtol=1e-6)
        columns = run.columns(Table.STEPS, "observed", "grad_norm_reduced", "grad_norm_mean")
        assert columns["observed"].all()
        assert (columns["grad_norm_reduced"] < columns["grad_norm_mean"]).all()


def found(trained, case):
    runs = {path.name: Run.open(path) for path in (trained[1] / case).iterdir()}
    assert all(run.status == "complete" for run in runs.values())
    ours = ("sync.part_of_ranks", "loss.differs_along_axis", "loss.labels_lost")
    return {
        name: {one.cause: one for one in run.findings() if one.cause in ours}
        for name, run in runs.items()
    }


@pytest.mark.parametrize(
    ("case", "how"),
    [
        ("DDP over a pair", "DistributedDataParallel got a process_group of 2 ranks"),
        ("FSDP2 over a pair", "fully_shard got a mesh of 2 ranks"),
    ],
)
def test_pairs_that_never_meet_are_found_in_both_runs(trained, case, how):
    for findings in found(trained, case).values():
        [finding] = findings.values()
        assert (finding.cause, str(finding.severity)) == ("sync.part_of_ranks", "error")
        assert (finding.first_step, finding.evidence["groups"]) == (0, [[0, 1], [2, 3]])
        assert "over 2 of the 4 ranks" in finding.explanation
        assert how in finding.explanation


@pytest.mark.parametrize("case", [case for case in CASES if case not in WRONG])
def test_what_is_right_or_intended_is_not_mentioned(trained, case):
    assert not any(found(trained, case).values())


def test_labels_that_are_lost_between_parts_are_counted(trained):
    finding = found(trained, "labels of cp")["run"]["loss.labels_lost"]
    assert (finding.first_step, finding.evidence["lost"]) == (0, ROWS)


# Tensor parallelism that is written by hand, without a wrapper and without another axis ---------


def same(given, group):
    return given.clone()


def total(given, group):
    given = given.clone()
    dist.all_reduce(given, group=group)
    return given


class Divided(nn.Module):
    def __init__(self, place, *, right):
        super().__init__()
        self.back = total if right else same
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)
        torch.manual_seed(place)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, inputs):
        hidden = exchange(self.norm(inputs), None, same, self.back)
        return self.head(inputs + exchange(self.down(self.up(hidden).relu()), None, total, same))


def train_parts(rank, folder):
    for name, right in {"right": True, "wrong": False}.items():
        model = Divided(rank, right=right)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with rankscope.watch(model, optimizer, run_dir=f"{folder}/{name}", verify_at=[3]) as scope:
            for step in range(6):
                torch.manual_seed(step)  # the same batch on both
                inputs, targets = torch.randn(8, 8), torch.randint(4, (8,))
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
                scope.loss(loss.detach(), weight=8)
                optimizer.step()
                optimizer.zero_grad()


def test_ranks_that_hold_parts_of_one_model_are_not_compared_and_its_gradient_is(tmp_path):
    run_ranks(train_parts, 2, str(tmp_path))
    right, wrong = (Run.open(tmp_path / name) for name in ("right", "wrong"))
    assert faults(right) == {}
    notes = {finding.id: finding.explanation for finding in right.findings()}
    assert "data-parts-of-one-model" in notes
    assert "The gradient of step 3 is the derivative of the loss" in " ".join(notes.values())
    [finding] = faults(wrong).values()
    assert finding.cause == "verify.derivative"
    assert "norm" in finding.explanation


def train_stages(rank, folder):
    groups = {pair: dist.new_group(pair) for pair in ((0, 2), (1, 3), (0, 1), (2, 3))}
    data, line = (group for pair, group in groups.items() if rank in pair)
    bits = {}
    for name in ("alone", "right", "wrong"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4 + rank % 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run_dir = None if name == "alone" else f"{folder}/{name}/run"
        options = {"process_group": data, "canary": False, "verify_at": [3]}
        with watch(model, optimizer, run_dir=run_dir, **options):
            for step in range(STEPS):
                inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(4 * step + rank))
                model(inputs).square().mean().backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad, group=data)
                    parameter.grad /= 2
                model[0].weight.grad *= 1.5 if name == "wrong" else 1.0
                dist.all_reduce(model[0].weight.grad, group=line)
                optimizer.step()
                optimizer.zero_grad()
        bits[name] = [parameter.tolist() for parameter in model.parameters()]
    assert bits["right"] == bits["alone"]


def test_what_stages_sum_is_judged_before_that(tmp_path):
    run_ranks(train_stages, RANKS, str(tmp_path))
    for name in ("right", "wrong"):
        runs = [Run.open(path) for path in (tmp_path / name).iterdir()]
        for run in runs:
            residuals = run.columns(Table.STEPS, "reduction_residual")["reduction_residual"]
            assert ((residuals < 1e-5) == (name == "right")).all()
            assert (faults(run) == {}, run.num_workers) == (name == "right", 2)

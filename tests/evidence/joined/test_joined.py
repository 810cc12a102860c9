import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import Run
from rankscope.verdict.assessment import assess
from rankscope.verdict.coverage import coverage_of
from support.loops import collect_warnings
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS, THAW = 16, 6
CASES = ("ddp", "fsdp2", "group", "stays", "own", "drifts", "adapter", "rootless")


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))


def train(rank, folder):
    """Return the bits of each case, watched and not."""
    collect_warnings()
    return {case: [run(rank, case, path) for path in (f"{folder}/{case}", None)] for case in CASES}


def run(rank, case, path):
    model = make()
    torch.manual_seed(rank if case == "own" else 1)
    beside = nn.Linear(4, 4)
    if case in ("fsdp2", "adapter", "rootless"):
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[0], mesh=mesh)
        wrapped = model if case == "rootless" else fully_shard(model, mesh=mesh)
        if case == "adapter":  # which nobody reduces
            model[2] = nn.Sequential(model[2], nn.Linear(16, 16))
    else:
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    if case not in ("group", "rootless"):
        model[0].requires_grad_(False)
    trained = [p for p in model.parameters() if case == "ddp" or p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    if case in ("own", "drifts"):
        optimizer.add_param_group({"params": list(beside.parameters())})
    scope = path and rankscope.watch(wrapped, optimizer, run_dir=path, overhead_budget=None)
    generator = torch.Generator().manual_seed(10 + rank)
    for step in range(STEPS):
        if step == THAW and case in ("ddp", "fsdp2"):
            model[0].requires_grad_(True)
        if step == THAW and case == "fsdp2":
            optimizer.add_param_group({"params": list(model[0].parameters())})
        if step == THAW and case == "group":
            optimizer.add_param_group({"params": list(beside.parameters())})
        output = wrapped(torch.randn(4, 8, generator=generator))
        output = beside(output) if case in ("group", "own", "drifts") else output
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if scope:
        scope.close()
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return b"".join(p.detach().numpy().tobytes() for p in whole)


@pytest.fixture(scope="module", autouse=True)
def trained(folder):
    for bits in run_ranks(train, 2, str(folder)):
        assert all(watched == plain for watched, plain in bits.values())


@pytest.mark.parametrize("case", ["ddp", "fsdp2"])
def test_a_layer_that_thaws_is_named_in_the_verdict(folder, case):
    recorded = Run.open(folder / case)
    joined = recorded.info["joined"]
    assert (joined["tensors"], joined["names"]) == (2, ["0.weight", "0.bias"])
    assert THAW <= joined["step"] < THAW + 8
    found = assess(recorded)
    words = "4 of the 6 trained tensors watched, without 0.weight and 0.bias, trained since step 7"
    assert words in found.headline
    assert found.word == "note"
    assert "Call watch() once all parameters are unfrozen" in found.recommendation
    assert any("4 of the 6 tensors that are trained, without" in one for one in found.statements)


def test_what_an_optimizer_is_given_later_is_counted(folder):
    coverage = coverage_of(Run.open(folder / "group"))
    assert (coverage.watched, coverage.updated) == (6, 8)
    assert "a tensor of shape (4, 4) and a tensor of shape (4,)" in coverage.limits


def test_a_layer_that_stays_frozen_is_no_limit(folder):
    recorded = Run.open(folder / "stays")
    assert "joined" not in recorded.info
    assert "trained" not in coverage_of(recorded).limits


@pytest.mark.parametrize(
    ("case", "severity", "words"),
    [
        ("own", "NOTE", "Linear.bias and Linear.weight are in no watched model"),
        ("drifts", "WARNING", "Linear.bias and Linear.weight are in no watched model"),
        ("adapter", "WARNING", "2.1.weight and 2.1.bias are in the watched model, and its wrapper"),
        ("rootless", "WARNING", "2.weight, 2.bias, 3.weight and 1 other are in the watched model"),
    ],
)
def test_a_layer_that_each_worker_trains_for_itself_is_named(folder, case, severity, words):
    found = {f.cause: f for f in Run.open(folder / case).findings()}["state.unwatched_differs"]
    assert (found.severity.name, found.last_step) == (severity, 7)
    assert found.explanation.startswith(words)

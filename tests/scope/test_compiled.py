"""``torch.compile`` around and inside DDP, before and after ``watch``."""

import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import Run
from rankscope.bus.columns import Table
from support.mode_runs import STEPS, ModeRun, train_in_modes
from support.modes import Mode
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

COMPILED = [
    Mode("inside DDP", {}, compiled="inside DDP", accumulate=2),
    Mode("around DDP", {}, compiled="around DDP", accumulate=2),
    Mode("around DDP, after watch", {}, compiled="around DDP, after watch"),
]


def train_compiled(rank: int, folder: str) -> dict[str, dict[str, Any]]:
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    results = {}
    for mode in COMPILED:
        torch._dynamo.reset()
        results |= train_in_modes(rank, [mode], folder)
    return results


@pytest.fixture(scope="module")
def runs():
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(train_compiled, 3, folder, timeout=240)
        yield {
            mode.name: ModeRun([rank[mode.name] for rank in ranks], mode, Path(folder))
            for mode in COMPILED
        }


@pytest.mark.parametrize("mode", COMPILED, ids=lambda mode: mode.name)
def test_compiled_models_are_measured_and_left_alone(runs, mode):
    run = runs[mode.name]
    assert run.steps.tolist() == list(range(STEPS))
    run.check_bits()
    run.check_norms_and_losses()
    run.check_reduced_norm()
    run.check_reduction()
    run.check_groups()
    run.check_micro_batches()


class Net(nn.Module):
    """Dynamo traces the hooks of modules that are not torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(torch.relu(inputs))
        return outputs


def train_compiled_in_place(rank: int, folder: str) -> dict[str, bytes]:
    bits = {}
    for when in ("unwatched", "before watch", "after watch", "after a step"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = Net()
        ddp = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        if when in ("unwatched", "before watch"):
            net.compile(backend="eager", fullgraph=True)
        if when != "unwatched":
            run_dir = f"{folder}/{when}"
            scope = rankscope.watch(ddp, optimizer, run_dir=run_dir, overhead_budget=None)
        for step in range(STEPS):
            if (when, step) in (("after watch", 0), ("after a step", 1)):
                net.compile(backend="eager", fullgraph=True)
            inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step + rank))
            ddp(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if when != "unwatched":
            scope.close()
        bits[when] = net.head.weight.detach().numpy().tobytes()
    return bits


def test_a_module_compiled_in_place_as_one_graph_stays_one(tmp_path):
    for bits in run_ranks(train_compiled_in_place, 2, str(tmp_path)):
        assert len(bits) == 4
        assert len(set(bits.values())) == 1
    for when in ("before watch", "after watch", "after a step"):
        assert Run.open(tmp_path / when).table(Table.STEPS).num_rows == STEPS

"""Pipeline stages whose runs begin one after the other: they meet at their first update."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rankscope import Run
from rankscope.session.meetings import stages_begin_apart
from support.loops import collect_warnings, watch
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 8
WIDTH, VOCABULARY = 8, 24


class Stage(nn.Module):
    """A layer, and a copy of the weight that both stages share."""

    def __init__(self, number, shared):
        super().__init__()
        torch.manual_seed(number)
        if number == 0:
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        if number == 1:
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.number = number
        with torch.no_grad():
            self.shared.copy_(shared)

    @property
    def shared(self):
        return self.head.weight if self.number else self.embedding.weight

    def forward(self, inputs):
        hidden = self.layers(inputs if self.number else self.embedding(inputs))
        return (self.head(hidden) if self.number else hidden).clone()


def train(rank, folder):
    warnings = collect_warnings()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    number, worker = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    for name in ("summed", "apart"):
        torch.manual_seed(9)
        stage = Stage(number, torch.randn(VOCABULARY, WIDTH))
        fully_shard(stage, mesh=mesh["dp"])
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        with stages_begin_apart():
            scope = watch(stage, optimizer, run_dir=f"{folder}/{name}")
        for step in range(STEPS):
            torch.manual_seed(100 * step + 10 * worker + number)
            tokens = torch.randint(VOCABULARY, (4, 6))
            loss = stage(tokens if number == 0 else torch.randn(4, 6, WIDTH)).square().mean()
            scope.loss(loss)
            loss.backward()
            if name == "summed":
                dist.all_reduce(stage.shared.grad.to_local(), group=mesh["pp"].get_group())
            optimizer.step()
            optimizer.zero_grad()
        scope.close()
    return warnings


def test_a_shared_weight_is_found_at_the_first_update_and_must_stay_equal(tmp_path):
    for warnings in run_ranks(train, 4, str(tmp_path), timeout=200):
        assert warnings == []
    found = {}
    for name in ("summed", "apart"):
        runs = [tmp_path / name, tmp_path / f"{name}-from-rank-2"]
        each = [finding for run in runs for finding in Run.open(run).findings()]
        found[name] = [f for f in each if str(f.severity) != "note"]
    assert found["summed"] == []
    [finding] = found["apart"]
    assert (finding.cause, str(finding.severity)) == ("sync.tied_weights", "warning")
    assert "embedding.weight = head.weight" in finding.explanation

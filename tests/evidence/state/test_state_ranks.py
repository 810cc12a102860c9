"""Digests of state on real ranks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import Run, Severity
from rankscope.bus.replicas import StateKind, differences
from rankscope.evidence.state.meter import StateMeter
from support.loops import collect_warnings
from support.ranks import run_ranks
from support.state import KINDS, Model, of, reductions


def _train_on_rank(rank, desynchronised):
    model = Model()
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    meter = StateMeter(model, optimizer, replicated=True)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, name=name: meter.see_local(name, parameter.grad)
        )
    torch.manual_seed(rank)
    results = []
    for step in range(6):
        meter.begin_step(step)
        optimizer.zero_grad()
        if desynchronised:
            with ddp.no_sync():
                ddp(torch.randint(5000, (8,))).backward()
        else:
            ddp(torch.randint(5000, (8,))).backward()
        meter.see_reduced()
        meter.see_applied()
        optimizer.step()
        meter.see_state()
        state, values = meter.collect().read()
        results.append((state, values))
    assert dist.get_world_size() == 2
    return results


@pytest.mark.ranks
@pytest.mark.parametrize("desynchronised", [False, True])
def test_real_ranks_agree_for_as_long_as_they_reduce(desynchronised):
    one, other = run_ranks(_train_on_rank, 2, desynchronised)
    for (a, values_a), (b, values_b) in zip(one, other, strict=True):
        assert a.items == b.items
        unequal = {
            kind
            for kind in StateKind
            if kind is not StateKind.STATISTICS and of(a, kind) != of(b, kind)
        }
        told = [reductions(a), reductions(b)]
        if desynchronised:
            assert unequal == set(KINDS)
            assert all(unchanged for each in told for unchanged in each.values())
        else:
            assert not unequal
            assert not any(unchanged for each in told for unchanged in each.values())
            assert values_a["applied_scale"] == values_b["applied_scale"] == 1.0


def _shard_on_rank(rank):
    model = Model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    meter = StateMeter(model, optimizer, replicated=True)
    torch.manual_seed(rank)
    results = []
    for step in range(70):
        meter.begin_step(step)
        if step < 2:
            optimizer.zero_grad()
            model(torch.randint(5000, (8,))).backward()
        meter.see_reduced()
        meter.see_applied()
        if step < 2:
            optimizer.step()
        if step == 3 and rank == 3:
            with torch.no_grad():
                model.embed.weight.to_local()[2400, 3] += 1
        meter.see_state()
        results.append(meter.collect().read())
    return results


@pytest.mark.ranks
def test_equal_shards_are_compared_by_their_local_parts():
    ranks = run_ranks(_shard_on_rank, 4)
    different = set()
    for step in range(70):
        states = [results[step][0] for results in ranks]
        assert len({state.items for state in states}) == 1
        assert len({results[step][1]["state_layout"] for results in ranks}) == 1
        digests_WD = np.stack([state.digests_D for state in states])
        found = differences(
            states[0], digests_WD, np.zeros_like(digests_WD, bool), np.array([0, 1, 0, 1])
        )
        for difference in found:
            if difference.kind is not StateKind.STATISTICS:
                assert difference.digests_W[0] == difference.digests_W[2]
                different.add((difference.kind, difference.name))
    ((kind, name),) = different
    assert kind is StateKind.PARAMETER
    start, stop = name.removeprefix("embed.weight[").removesuffix("]").split(":")
    assert int(start) <= 2400 * 64 + 3 < int(stop) <= 2500 * 64


class Counting(nn.Module):
    """Keeps a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += x.detach().mean()
        return x


def convolutional(*, counting):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
        Counting() if counting else nn.Identity(),
    )


NORMALISED = {
    "by default": None,
    "while accumulating and evaluating": None,
    "with a buffer of another kind": "9.seen",
    "with a buffer that is added up and emptied": None,
    "with broadcasts that send nothing": "1.running_mean",
    "without broadcasts": None,
    "without broadcasts though DDP has been told to": "1.running_mean",
}
"""Ways to train with batch normalisation, and what differs where it should not."""


def _normalise_on_rank(rank, folder):
    told = {}
    for name in NORMALISED:
        model = convolutional(counting="a buffer" in name)
        options = {"broadcast_buffers": False} if name == "without broadcasts" else {}
        ddp = DistributedDataParallel(model, **options)
        if "send nothing" in name:
            ddp._sync_module_buffers = lambda authoritative_rank: None
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        warnings = collect_warnings()
        torch.manual_seed(rank)
        scope = rankscope.watch(ddp, optimizer, run_dir=f"{folder}/{name}", canary=False)
        for step in range(24):
            if "though" in name:
                ddp.require_forward_param_sync = False
            if "accumulating" in name:
                with ddp.no_sync():
                    ddp(torch.randn(4, 3, 6, 6)).square().mean().backward()
            ddp(torch.randn(4, 3, 6, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if "emptied" in name:
                torch.distributed.all_reduce(model[-1].seen)
                model[-1].seen.zero_()
            if "evaluating" in name and step % 3 == 2:
                ddp.eval()
                with torch.no_grad():
                    ddp(torch.randn(4, 3, 6, 6))
                ddp.train()
        scope.close()
        told[name] = warnings
    return told


@pytest.mark.ranks
def test_running_statistics_may_drift_apart_between_two_broadcasts(tmp_path):
    for warnings in run_ranks(_normalise_on_rank, 2, str(tmp_path), timeout=240):
        assert warnings == {name: [] for name in NORMALISED}
    for name, wrong in NORMALISED.items():
        findings = {finding.id: finding for finding in Run.open(tmp_path / name).findings()}
        error = findings.pop("state.buffers_differ", None)
        assert (error is None) == (wrong is None), name
        if error is not None:
            assert error.severity is Severity.ERROR
            assert wrong in error.evidence["names"][0]
        assert [one.id for one in findings.values() if one.severity > Severity.NOTE] == []
        assert "running-statistics" in findings, name

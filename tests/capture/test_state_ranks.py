"""Digests of state on real ranks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rankscope.capture.state.meter import StateMeter
from rankscope.core.replicas import StateKind, differences
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
            if kind is not StateKind.BUFFER and of(a, kind) != of(b, kind)
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
            if difference.kind is not StateKind.BUFFER:
                assert difference.digests_W[0] == difference.digests_W[2]
                different.add((difference.kind, difference.name))
    ((kind, name),) = different
    assert kind is StateKind.PARAMETER
    start, stop = name.removeprefix("embed.weight[").removesuffix("]").split(":")
    assert int(start) <= 2400 * 64 + 3 < int(stop) <= 2500 * 64

"""Training under the modes of FSDP2, and what an unsharded copy of the model says about it."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rankscope.gradients.names import canonical_name
from support.fsdp2_modes import Mode, make_batches, make_net


@dataclass
class Session:
    mode: Mode
    model: nn.Module
    root: Any
    oracle: nn.Module
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    worker: int


def start(mode):
    world = dist.get_world_size()
    shape, names = {
        "1-D": ((world,), ("dp",)),
        "HSDP": ((2, world // 2), ("replicate", "shard")),
        "replicas": ((world, 1), ("replicate", "shard")),
        "TP": ((world // 2, 2), ("dp", "tp")),
    }[mode.mesh]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    net = make_net()
    oracle = copy.deepcopy(net)
    root = mode.prepare(net)
    for parameter, exact in zip(root.parameters(), oracle.parameters(), strict=True):
        exact.requires_grad_(parameter.requires_grad)
    data_mesh = mesh
    if mode.mesh == "TP":
        data_mesh = mesh["dp"]
        for block in net.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
    if mode.replicates:
        replicate(root, mesh=data_mesh)
    else:
        for block in net.blocks:
            fully_shard(block, mesh=data_mesh, **mode.options)
        fully_shard(root, mesh=data_mesh, **{**mode.options, "reshard_after_forward": False})
    model = mode.finish(root)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    worker = dist.get_rank() // 2 if mode.mesh == "TP" else dist.get_rank()
    return Session(mode, model, root, oracle, optimizer, data_mesh, worker)


def train_step(session, step, *, begin=lambda: None, see=lambda loss: None):
    """Run the backward passes of a step; ``begin`` comes before each, ``see`` is given its loss."""
    mode = session.mode
    batches = make_batches(session.worker, step, mode.accumulate)
    for micro, (ids, labels) in enumerate(batches):
        getattr(session.root, mode.unsynchronised)(micro == len(batches) - 1)
        begin()
        loss = session.model(ids, labels)
        see(loss)
        (loss / len(batches)).backward()


def optimize(session):
    session.optimizer.step()
    session.optimizer.zero_grad(set_to_none=not session.mode.zero_in_place)


def local_gradient(session, step):
    """Return this worker's gradient, under TP a part, and micro-batches' squared norms, exactly."""
    oracle = session.oracle
    _copy_parameters(session, oracle)
    policy = session.mode.options.get("mp_policy")
    net = copy.deepcopy(oracle).to(policy.param_dtype) if policy else oracle
    totals = {}
    squared_norms = []
    batches = make_batches(session.worker, step, session.mode.accumulate)
    for ids, labels in batches:
        net.zero_grad()
        (net(ids, labels) / len(batches)).backward()
        micro = 0.0
        for name, parameter in net.named_parameters():
            if parameter.grad is None:
                continue
            gradient = _part(session, name, parameter.grad)
            micro += float(gradient.double().square().sum())
            gradient = gradient.to(policy.reduce_dtype) if policy else gradient
            totals[name] = totals[name] + gradient if name in totals else gradient.clone()
        squared_norms.append(micro)
    return totals, squared_norms


def _copy_parameters(session, oracle):
    whole = {
        canonical_name(name): parameter.full_tensor()
        for name, parameter in session.model.named_parameters()
        if isinstance(parameter, DTensor)
    }
    oracle.load_state_dict(whole)


def _part(session, name, gradient):
    if session.mode.mesh != "TP" or "blocks" not in name or "norm" in name:
        return gradient
    half = dist.get_rank() % 2
    return gradient.chunk(2, dim=1 if "down" in name else 0)[half]

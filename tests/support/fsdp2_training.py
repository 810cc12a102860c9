"""Training under the modes of FSDP2, and what an unsharded copy of the model says about it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rankscope.bus.groups import group_parameters
from rankscope.gradients.names import canonical_name
from rankscope.gradients.sketch import Sketcher
from rankscope.wrappers.fsdp2 import FSDP2Tap
from rankscope.wrappers.fsdp2_model import fsdp2_device, fsdp2_parameters
from rankscope.wrappers.tap import LocalGradient, ReadReduced
from support.fsdp2_modes import Mode, make_batches, make_net, mode_named

WIDTH = 1021
EXACT = 1e-5


@dataclass
class Session:
    """A sharded model with its optimizer, and the workers that are compared."""

    mode: Mode
    model: nn.Module
    root: Any
    oracle: nn.Module
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    worker: int


def start(mode: Mode) -> Session:
    """Shard a model, on every rank alike."""
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


def make_tap(session: Session, reduced: ReadReduced = ReadReduced.SKETCH) -> FSDP2Tap:
    parameters = fsdp2_parameters(session.model)
    groups = group_parameters(parameters)
    sketcher = Sketcher(fsdp2_device(session.model), groups, WIDTH)
    return FSDP2Tap(
        session.model,
        parameters,
        sketcher,
        lambda work: work(),
        reduced=reduced,
        observer=Nobody(),
    )


class Nobody:
    """A observer that looks away."""

    def see_local(self, name, gradient):
        pass

    def see_reduced(self):
        pass


def train_step(
    session: Session,
    step: int,
    tap: FSDP2Tap | None,
    see: Callable[[Tensor], object] = lambda loss: None,
) -> None:
    """Run the backward passes of a step; ``see`` is given each loss."""
    mode = session.mode
    batches = make_batches(session.worker, step, mode.accumulate)
    for micro, (ids, labels) in enumerate(batches):
        getattr(session.root, mode.unsynchronised)(micro == len(batches) - 1)
        if tap is not None:
            tap.begin_forward(measure=True)
        loss = session.model(ids, labels)
        see(loss)
        (loss / len(batches)).backward()


def other_gradients(
    session: Session, step: int, tap: FSDP2Tap, *, measure: bool = True
) -> tuple[Tensor, Tensor]:
    """Ask for the gradient of a layer's output alone, as attacks on a model do."""
    loss, hidden = hidden_pass(session, step, tap, measure=measure)
    (gradient,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    assert gradient.abs().max() > 0
    return loss, hidden


def hidden_pass(
    session: Session, step: int, tap: FSDP2Tap, *, measure: bool = True
) -> tuple[Tensor, Tensor]:
    """Run a forward pass, and return its loss and the first block's output."""
    outputs: list[Tensor] = []
    hook = session.root.blocks[0].register_forward_hook(
        lambda module, args, output: outputs.append(output)
    )
    tap.begin_forward(measure=measure)
    loss: Tensor = session.model(*make_batches(session.worker, step, 1)[0])
    hook.remove()
    return loss, outputs[0]


def optimize(session: Session) -> None:
    session.optimizer.step()
    session.optimizer.zero_grad(set_to_none=not session.mode.zero_in_place)


def local_gradient(session: Session, step: int) -> tuple[dict[str, Tensor], list[float]]:
    """Compute this worker's gradient without FSDP2, and the squared norms of its micro-batches.

    Under TP: this rank's part of each parameter's gradient.
    """
    oracle = session.oracle
    _copy_parameters(session, oracle)
    policy = session.mode.options.get("mp_policy")
    net = copy.deepcopy(oracle).to(policy.param_dtype) if policy else oracle
    totals: dict[str, Tensor] = {}
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


def _copy_parameters(session: Session, oracle: nn.Module) -> None:
    whole = {
        canonical_name(name): parameter.full_tensor()
        for name, parameter in session.model.named_parameters()
        if isinstance(parameter, DTensor)
    }
    oracle.load_state_dict(whole)


def _part(session: Session, name: str, gradient: Tensor) -> Tensor:
    if session.mode.mesh != "TP" or "blocks" not in name or "norm" in name:
        return gradient
    half = dist.get_rank() % 2
    return gradient.chunk(2, dim=1 if "down" in name else 0)[half]


def state_of(session: Session) -> list[bytes]:
    """Return all bits of this rank's parameters, optimizer state and random generator."""
    parameters = [_local(parameter) for parameter in session.model.parameters()]
    moments = [
        _local(value)
        for state in session.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    tensors = [*parameters, *moments, torch.get_rng_state()]
    return [tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]


def _local(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.reshape(-1)


def sketch_error(tap: FSDP2Tap, local: LocalGradient, exact: dict[str, Tensor]) -> float:
    """Return how far what was read is from the sketch of a gradient, relative to it."""
    totals = tap._sketcher.new_totals()
    for name, gradient in exact.items():
        tap._sketcher.measure(name, gradient, totals)
    error = (local.totals.sketches - totals.sketches).norm() / totals.sketches.norm()
    return float(error)


def norm_error(local: LocalGradient, exact: dict[str, Tensor]) -> float:
    """Return how far the norm that was read is from a gradient's, relative to it."""
    squared_norm = sum(float(gradient.double().square().sum()) for gradient in exact.values())
    return abs(float(local.totals.squared_norms.sum()) / squared_norm - 1) / 2


def reduced_error(local: LocalGradient, exact: dict[str, Tensor], copies: int = 1) -> float:
    """Return how far the norm of the reduced gradient is from that of the mean, relative to it."""
    assert local.reduced is not None
    mean = torch.cat([gradient.double().flatten() for gradient in exact.values()])
    squared_norm = local.reduced.squared_norms.sum()
    dist.all_reduce(mean)
    dist.all_reduce(squared_norm)
    exact_squared_norm = (mean / dist.get_world_size()).square().sum()
    return abs(float(squared_norm / copies / exact_squared_norm) - 1) / 2


def session_of(model: Any) -> Session:
    """Return a session of a model that is sharded already."""
    optimizer = torch.optim.SGD(model.parameters())
    mode = mode_named("1-D")
    return Session(mode, model, model, model, optimizer, None, dist.get_rank())  # type: ignore[arg-type]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check(tap: FSDP2Tap, exact: dict[str, Tensor], *, copies: int = 1) -> LocalGradient:
    """Return what was read, after a look at its sketch and at the reduced gradient's norm."""
    assert tap.complete
    assert not tap.aborted
    local = tap.collect()
    assert local is not None
    assert sketch_error(tap, local, exact) < EXACT
    assert reduced_error(local, exact, copies) < EXACT
    return local

"""Trainings on real ranks whose reductions are audited, and what is true of them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.session import instruments
from support.releases import SINCE_TORCH_2_15

STEPS = 3
SECTION_ELEMENTS = 1500  # a layer's weight then lies in three sections
ODD_RANK, ODD_STEP, ODD_FACTOR = 1, 2, 1.5


@dataclass(frozen=True)
class Case:
    name: str
    parallel: str = "DDP"  # or "FSDP2", "HSDP"
    hook: str = ""
    reduce_dtype: torch.dtype | None = None  # of FSDP2
    accumulate: int = 1
    unused: str = ""  # whether some ranks leave the branch out: "some"
    expected_type: str = "float32"
    rounds: bool = False  # the reduction has 16 bits


class Net(nn.Module):
    """Two layers, a branch that may stay unused, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(60, 60) for _ in range(2)])
        self.branch = nn.Linear(60, 60)
        self.head = nn.Linear(60, 7)

    def forward(self, inputs: Tensor, branch: bool) -> Tensor:
        hidden = inputs
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        if branch:
            hidden = hidden + self.branch(hidden)
        return self.head(hidden).square().mean()


def train_cases(rank: int, cases: list[Case], folder: str) -> dict[str, Any]:
    """Train each case; return local and reduced gradients by step and parameter, as float64."""
    with mock.patch.object(instruments, "SECTION_ELEMENTS", SECTION_ELEMENTS):
        return {case.name: _train(rank, case, f"{folder}/{case.name}") for case in cases}


def _train(rank: int, case: Case, run_dir: str) -> list[dict[str, Any]]:
    net = Net()
    twin = copy.deepcopy(net)
    model = _wrap(net, case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps: list[dict[str, Any]] = []
    with rankscope.watch(model, optimizer, run_dir=run_dir, reduced="sketch", overhead_budget=None):
        for step in range(STEPS):
            batches = _batches(rank, step, case)
            branch = not (case.unused == "some" and rank == 0)
            _load(twin, net)
            for batch in batches:
                (twin(batch, branch) / case.accumulate).backward()
            local = {n: _flat(_accumulated(p.grad, case), p) for n, p in twin.named_parameters()}
            twin.zero_grad()
            for micro, batch in enumerate(batches):
                with _synchronised(model, micro == case.accumulate - 1):
                    (model(batch, branch) / case.accumulate).backward()
            reduced = {n: _flat(_whole(p.grad), p) for n, p in net.named_parameters()}
            steps.append({"local": local, "reduced": reduced})
            optimizer.step()
            optimizer.zero_grad()
    return steps


def _accumulated(gradient: Tensor | None, case: Case) -> Tensor | None:
    """Return a gradient in the type in which it reaches the reduction."""
    rounds = SINCE_TORCH_2_15 and gradient is not None and case.reduce_dtype is not None
    return gradient.to(case.reduce_dtype) if rounds else gradient


def _wrap(net: Net, case: Case) -> nn.Module:
    if case.parallel == "DDP":
        ddp = DistributedDataParallel(
            net, find_unused_parameters=bool(case.unused), bucket_cap_mb=0.02
        )
        if case.hook:
            ddp.register_comm_hook(_HookState(ddp), HOOKS[case.hook])
        return ddp
    world = dist.get_world_size()
    shape, names = ((world,), ("shard",))
    if case.parallel == "HSDP":
        shape, names = ((2, world // 2), ("replicate", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(reduce_dtype=case.reduce_dtype)
    for layer in [*net.layers, net.branch]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(net, mesh=mesh, mp_policy=policy)


class _HookState:
    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.watched = dict(ddp.module.named_parameters())["layers.0.weight"]
        self.calls = 0


def _bfloat16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Add up in bfloat16, as torch's own hook does, which refuses to run on a CPU."""
    buffer = bucket.buffer()
    small = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    future: Any = dist.all_reduce(small, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def _one_element(state: _HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Change one element of one worker's own result, in one step."""
    held = [parameter is state.watched for parameter in bucket.parameters()]
    state.calls += any(held)
    odd = any(held) and dist.get_rank() == ODD_RANK and state.calls == ODD_STEP + 1

    def change(done: torch.futures.Future[Tensor]) -> Tensor:
        if odd:
            gradient = bucket.gradients()[held.index(True)].view(-1)
            gradient[gradient.abs().argmax()] *= ODD_FACTOR
        return done.value()

    return default_hooks.allreduce_hook(None, bucket).then(change)


HOOKS: dict[str, Callable[..., Any]] = {
    "bfloat16": _bfloat16,
    "one element": _one_element,
}


def _synchronised(model: nn.Module, last: bool) -> Any:
    if isinstance(model, DistributedDataParallel):
        return model.no_sync() if not last else torch.enable_grad()
    model.set_requires_gradient_sync(last)
    return torch.enable_grad()


def _batches(rank: int, step: int, case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(8, 60, generator=generator) for _ in range(case.accumulate)]


def _whole(gradient: Tensor | None) -> Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _load(twin: nn.Module, net: nn.Module) -> None:
    with torch.no_grad():
        for mine, other in zip(twin.parameters(), net.parameters(), strict=True):
            mine.copy_(_whole(other))


def _flat(gradient: Tensor | None, like: Tensor) -> np.ndarray:
    if gradient is None:
        return np.zeros(like.numel())
    return gradient.detach().double().flatten().numpy().copy()

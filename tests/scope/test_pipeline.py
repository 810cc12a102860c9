"""Pipeline schedules over FSDP2: each stage is watched by itself, by the ranks that hold it."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.faults.mesh_faults import SequenceParallelNorm, sum_parts
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from rankscope import Run
from rankscope.bus.evidence import Table
from support.findings import faults
from support.loops import collect_warnings, watch
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS, LATE, WIDTH, MICRO, BATCH = 5, 2, 8, 4, 8

CASES: dict[str, dict[str, Any]] = {
    "1F1B": {},
    "interleaved": {"schedule": ScheduleInterleaved1F1B, "parts": 2},
    "tensor parallel, norms are not summed": {"tp": 2, "fault": "norm"},
    "two calls": {"schedule": ScheduleGPipe, "calls": 2},
    "two calls, reset in between": {"schedule": ScheduleGPipe, "calls": 2, "fault": "reset"},
}
"""What is done: the schedule, parts on each rank, ranks along ``tp``, calls of the schedule for an
update, and what goes wrong since ``LATE``."""

COMPARED = ("interleaved", "two calls")
"""Trained without the monitor, too."""


class Block(nn.Module):
    def __init__(self, tp: DeviceMesh | None = None) -> None:
        super().__init__()
        norm = nn.LayerNorm(WIDTH)
        self.norm = norm if tp is None else SequenceParallelNorm(norm, tp.get_group())
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = hidden + self.down(self.up(self.norm(hidden)).tanh())
        return added


def batch_of(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + worker)
    batch = torch.randn(BATCH, 4, WIDTH, generator=generator)
    return batch, batch.roll(1, -1)


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def block_of(number: int, tp: DeviceMesh | None = None) -> Block:
    torch.manual_seed(number)
    return Block(tp)


def watched(parts: list[nn.Module], optimizers: list[Any], run_dir: Path | None) -> list[Any]:
    return [
        watch(part, optimizer, run_dir=run_dir / f"part {number}")
        for number, (part, optimizer) in enumerate(zip(parts, optimizers, strict=True))
        if run_dir is not None
    ]


def schedule_of(case: dict[str, Any], mesh: DeviceMesh, parts: list[Block], loss_fn: Any) -> Any:
    cpu, pp = torch.device("cpu"), mesh["pp"]
    last = 2 * len(parts)
    stages = [
        PipelineStage(part, pp.get_local_rank() + 2 * number, last, cpu, group=pp.get_group())
        for number, part in enumerate(parts)
    ]
    make = case.get("schedule", Schedule1F1B)
    more = {} if case.get("calls", 1) == 1 else {"scale_grads": False}
    given = stages if len(stages) > 1 else stages[0]
    return make(given, n_microbatches=MICRO, loss_fn=loss_fn, **more)


@functools.cache
def mesh_of(tp: int) -> DeviceMesh:
    """Return the mesh of all trainings with so many ranks along ``tp``."""
    return init_device_mesh("cpu", (2, 4 // tp, tp), mesh_dim_names=("pp", "dp", "tp"))


def parts_of(case: dict[str, Any], mesh: DeviceMesh, over: DeviceMesh | None) -> list[Any]:
    pp = mesh["pp"].get_local_rank()
    parts = [block_of(pp + 2 * number, over) for number in range(case.get("parts", 1))]
    for part in parts:
        fully_shard(part, mesh=mesh["dp"])
    return parts


def call_schedule(schedule: Any, case: dict[str, Any], step: int, optimizer: Any) -> None:
    """Call the schedule as often as an update needs it."""
    mesh = mesh_of(case.get("tp", 1))
    pp, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    fault = case.get("fault") if step >= LATE else None
    for call in range(case.get("calls", 1)):
        if fault == "reset" and call:
            optimizer.zero_grad()
        given, target = batch_of(dp, step + 9 * call)
        schedule.step(*((given,) if pp == 0 else ()), **({"target": target} if pp else {}))


def train(run_dir: Path | None, case: dict[str, Any]) -> list[bytes]:
    tp = case.get("tp", 1)
    mesh = mesh_of(tp)
    over = mesh["tp"] if tp > 1 else None
    parts = parts_of(case, mesh, over)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    calls = case.get("calls", 1)
    scopes = watched(parts, optimizers, run_dir)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = mean_loss(output, target)
        for scope in scopes[-1:]:
            scope.loss(loss)
        return loss if calls == 1 else loss / (calls * MICRO)

    schedule = schedule_of(case, mesh, parts, loss_fn)
    for step in range(STEPS):
        call_schedule(schedule, case, step, optimizers[0])
        fault = case.get("fault") if step >= LATE else None
        if over is not None and fault != "norm":
            sum_parts(parts[0], ("norm",), over.get_group())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for scope in reversed(scopes):
        scope.close()
    return [p.to_local().detach().numpy().tobytes() for part in parts for p in part.parameters()]


def train_all(rank: int, folder: str) -> dict[str, Any]:
    warnings = collect_warnings()
    same = {}
    for name, case in CASES.items():
        bits = train(Path(folder) / name, case)
        if name in COMPARED:
            same[name] = bits == train(None, case)
    return {"same": same, "warnings": warnings}


@pytest.fixture(scope="module", autouse=True)
def trained(folder):
    for result in run_ranks(train_all, 8, str(folder), timeout=400):
        assert all(result["same"].values()), result["same"]
        assert result["warnings"] == []


def run_of(folder: Path, case: str, first_rank: int, part: int = 0) -> Run:
    name = f"part {part}" + (f"-from-rank-{first_rank}" if first_rank else "")
    run = Run.open(folder / case / name)
    assert run.status == "complete"
    assert run.columns(Table.STEPS, "observed")["observed"].tolist() == [True] * STEPS
    return run


def oracle(num_blocks: int, worker: int) -> tuple[float, list[float]]:
    """Return the first step's loss and each block's gradient norm, of a model in one piece."""
    blocks = [block_of(number) for number in range(num_blocks)]
    given, target = batch_of(worker, 0)
    loss = mean_loss(nn.Sequential(*blocks)(given), target)
    loss.backward()
    norms = [torch.cat([p.grad.double().flatten() for p in b.parameters()]).norm() for b in blocks]
    return loss.item(), [float(norm) for norm in norms]


@pytest.mark.parametrize(("case", "parts"), [("1F1B", 1), ("interleaved", 2)])
def test_workers_of_each_stage_are_measured(folder, case, parts):
    exact = [oracle(2 * parts, worker) for worker in range(4)]
    for part in range(parts):
        for pp, first_rank in enumerate((0, 4)):
            run = run_of(folder, case, first_rank, part)
            assert (run.num_workers, faults(run)) == (4, {})
            _, norms_TW = run.per_worker("grad_norm")
            expected = [norms[pp + 2 * part] for _, norms in exact]
            # The schedule makes the sum over micro-batches their mean after the reduction. Where
            # the loss is known, so is that it was summed.
            has_loss = pp + 2 * part == 2 * parts - 1
            np.testing.assert_allclose(
                norms_TW[0] / (1 if has_loss else MICRO), expected, rtol=1e-5
            )
            _, scales_TW = run.per_worker("grad_scale")
            assert (scales_TW == MICRO).all() == has_loss
            _, later_TW = run.per_worker("schedule_scale")
            assert (later_TW == 1 / MICRO).all()
            _, counts_TW = run.per_worker("micro_batches")
            assert (counts_TW == MICRO).all()
            columns = run.columns(Table.STEPS, "reduction_residual")
            assert np.nanmax(columns["reduction_residual"]) < 1e-5


def test_the_last_stage_has_the_loss(folder):
    case = "1F1B"
    _, losses_TW = run_of(folder, case, 4).per_worker("loss")
    expected = [oracle(2, worker)[0] for worker in range(4)]
    np.testing.assert_allclose(losses_TW[0], expected, rtol=1e-5)
    _, losses_TW = run_of(folder, case, 0).per_worker("loss")
    assert np.isnan(losses_TW).all()


@pytest.mark.parametrize(("first_rank", "lines"), [(0, [[0, 1], [2, 3]]), (4, [[4, 5], [6, 7]])])
def test_a_partial_gradient_is_found_within_its_stage(folder, first_rank, lines):
    found = faults(run_of(folder, "tensor parallel, norms are not summed", first_rank))
    assert list(found) == ["sync.partial_gradient:tp"]
    [finding] = found.values()
    assert (finding.first_step, finding.evidence["lines"]) == (LATE, lines)
    assert sorted(finding.evidence["parameters"]) == ["norm.norm.bias", "norm.norm.weight"]


def test_a_reset_between_calls_is_found(folder):
    found = faults(run_of(folder, "two calls, reset in between", 4))
    accumulation = found["sync.accumulation"]
    assert (str(accumulation.severity), accumulation.first_step) == ("error", LATE)
    assert f"set to zero in 3 steps, since step {LATE}, before micro-batch {MICRO + 1}" in (
        accumulation.explanation
    )

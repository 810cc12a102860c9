import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from benchmarks.faults.mesh_faults import SequenceParallelNorm, sum_parts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from rankscope import Run
from rankscope.bus.evidence import Table
from rankscope.session.meetings import stages_begin_apart
from support.findings import faults
from support.fsdp2_modes import Block
from support.loops import bits_of, collect_warnings, watch
from support.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.ranks
STEPS, LATE, WIDTH, MICRO, BATCH = 5, 2, 8, 4, 8

CASES = {
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


def batch_of(worker, step):
    generator = torch.Generator().manual_seed(100 * step + worker)
    batch = torch.randn(BATCH, 4, WIDTH, generator=generator)
    return batch, batch.roll(1, -1)


def mean_loss(output, target):
    return (output - target).square().mean()


def block_of(number, tp=None):
    torch.manual_seed(number)
    block = Block(WIDTH)
    if tp is not None:
        block.norm = SequenceParallelNorm(block.norm, tp.get_group())
    return block


def schedule_of(case, mesh, parts, loss_fn):
    rank, of_all = mesh["pp"].get_local_rank(), (2 * len(parts), torch.device("cpu"))
    stages = [
        PipelineStage(part, rank + 2 * number, *of_all, group=mesh["pp"].get_group())
        for number, part in enumerate(parts)
    ]
    make = case.get("schedule", Schedule1F1B)
    more = {} if case.get("calls", 1) == 1 else {"scale_grads": False}
    given = stages if len(stages) > 1 else stages[0]
    return make(given, n_microbatches=MICRO, loss_fn=loss_fn, **more)


@functools.cache
def mesh_of(tp):
    return init_device_mesh("cpu", (2, 4 // tp, tp), mesh_dim_names=("pp", "dp", "tp"))


def call_schedule(schedule, case, step, optimizer):
    mesh = mesh_of(case.get("tp", 1))
    pp, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    fault = case.get("fault") if step >= LATE else None
    for call in range(case.get("calls", 1)):
        if fault == "reset" and call:
            optimizer.zero_grad()
        given, target = batch_of(dp, step + 9 * call)
        schedule.step(*((given,) if pp == 0 else ()), **({"target": target} if pp else {}))


def train(run_dir, case):
    tp, calls = case.get("tp", 1), case.get("calls", 1)
    mesh = mesh_of(tp)
    over = mesh["tp"] if tp > 1 else None
    parts, optimizers, scopes = [], [], []
    for number in range(case.get("parts", 1)):
        part = block_of(mesh["pp"].get_local_rank() + 2 * number, over)
        parts.append(fully_shard(part, mesh=mesh["dp"]))
        optimizers.append(torch.optim.SGD(part.parameters(), lr=0.1))
        if run_dir is not None:
            scopes.append(watch(part, optimizers[-1], run_dir=f"{run_dir}/part {number}"))

    def loss_fn(output, target):
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
    return [bits_of(part) for part in parts]


def train_all(rank, folder):
    warnings = collect_warnings()
    for name, case in CASES.items():
        bits = train(f"{folder}/{name}", case)
        assert name not in COMPARED or bits == train(None, case), name
    assert warnings == []


trained = on_ranks(train_all, 8, timeout=400.0)


def run_of(trained, case, first_rank, part=0):
    name = f"part {part}" + (f"-from-rank-{first_rank}" if first_rank else "")
    run = Run.open(trained[1] / case / name)
    assert run.status == "complete"
    assert run.columns(Table.STEPS, "observed")["observed"].tolist() == [True] * STEPS
    return run


def oracle(num_blocks, worker):
    """Return the first step's loss and each block's gradient norm, of a model in one piece."""
    blocks = [block_of(number) for number in range(num_blocks)]
    given, target = batch_of(worker, 0)
    loss = mean_loss(nn.Sequential(*blocks)(given), target)
    loss.backward()
    norms = [torch.cat([p.grad.double().flatten() for p in b.parameters()]).norm() for b in blocks]
    return loss.item(), [float(norm) for norm in norms]


@pytest.mark.parametrize(("case", "parts"), [("1F1B", 1), ("interleaved", 2)])
def test_workers_of_each_stage_are_measured(trained, case, parts):
    exact = [oracle(2 * parts, worker) for worker in range(4)]
    for part in range(parts):
        for pp, first_rank in enumerate((0, 4)):
            run = run_of(trained, case, first_rank, part)
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


def test_the_last_stage_has_the_loss(trained):
    _, losses_TW = run_of(trained, "1F1B", 4).per_worker("loss")
    expected = [oracle(2, worker)[0] for worker in range(4)]
    np.testing.assert_allclose(losses_TW[0], expected, rtol=1e-5)
    _, losses_TW = run_of(trained, "1F1B", 0).per_worker("loss")
    assert np.isnan(losses_TW).all()


@pytest.mark.parametrize(("first_rank", "lines"), [(0, [[0, 1], [2, 3]]), (4, [[4, 5], [6, 7]])])
def test_a_partial_gradient_is_found_within_its_stage(trained, first_rank, lines):
    found = faults(run_of(trained, "tensor parallel, norms are not summed", first_rank))
    assert list(found) == ["sync.partial_gradient:tp"]
    [finding] = found.values()
    assert (finding.first_step, finding.evidence["lines"]) == (LATE, lines)
    assert sorted(finding.evidence["parameters"]) == ["norm.norm.bias", "norm.norm.weight"]


def test_a_reset_between_calls_is_found(trained):
    found = faults(run_of(trained, "two calls, reset in between", 4))
    accumulation = found["sync.accumulation"]
    assert (str(accumulation.severity), accumulation.first_step) == ("error", LATE)
    assert f"set to zero in 3 steps, since step {LATE}, before micro-batch {MICRO + 1}" in (
        accumulation.explanation
    )


# Pipeline stages whose runs begin one after the other: they meet at their first update ----------

LATE_STEPS = 8
VOCABULARY = 24


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


def train_late(rank, folder):
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
        for step in range(LATE_STEPS):
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
    for warnings in run_ranks(train_late, 4, str(tmp_path), timeout=200):
        assert warnings == []
    summed, apart = (
        [f for run in tmp_path.glob(f"{name}*") for f in faults(Run.open(run)).values()]
        for name in ("summed", "apart")
    )
    assert summed == []
    [finding] = apart
    assert (finding.cause, str(finding.severity)) == ("sync.tied_weights", "warning")
    assert "embedding.weight = head.weight" in finding.explanation

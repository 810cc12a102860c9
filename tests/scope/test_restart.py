import contextlib
import copy
import os
import shutil
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rankscope import Run, Severity
from rankscope.bus.evidence import Table
from rankscope.bus.step import as_recorded
from rankscope.errors import RunError
from rankscope.record import writer
from rankscope.record.begin import LOCK_FILE
from rankscope.record.states import START_FILE, STATE_FILE, read_state
from rankscope.session import opening
from rankscope.verdict.diagnosis import diagnose_run
from support.findings import told
from support.loops import Loop, root_of, watch
from support.ranks import RankError, on_ranks, run_ranks
from support.same import assert_same

pytestmark = pytest.mark.ranks
KILLED_AFTER = 14


def last_on_disk(run_dir):
    try:
        return Run.open(run_dir).columns(Table.STEPS, "step")["step"].max(initial=-1)
    except RunError:  # there is none as yet
        return -1


def move_while_training(rank, run_dir):
    loop = Loop(rank, run_dir, flush_seconds=0.0)
    for step in range(3):
        loop.step(step)
    if rank == 0:
        while last_on_disk(run_dir) < 1:
            time.sleep(0.05)
        Path(run_dir).rename(f"{run_dir}-kept")
        Path(run_dir).mkdir()
        Path(run_dir, "run.json").write_text("{}")
    dist.barrier()
    for step in range(3, 9):
        loop.step(step)
    loop.close()
    return loop.warnings


def test_a_run_goes_on_in_its_directory_where_that_is_moved(tmp_path):
    warnings, _ = run_ranks(move_while_training, 2, str(tmp_path / "run"))
    moved = f"run has been moved; its record goes on in {tmp_path / 'run-kept'}"
    assert sum(moved in line for line in warnings) == 1  # and of a write under way
    run = Run.open(tmp_path / "run-kept")
    assert run.status == "complete"
    assert run.columns(Table.STEPS, "step")["step"].tolist() == list(range(9))
    assert [one.name for one in (tmp_path / "run").iterdir()] == ["run.json"]
    assert not (run.path / LOCK_FILE).exists()


def copied_batches(rank, run_dir, num_steps, kill):
    writer.STATE_BYTES_PER_FLUSH = 1  # so the state is older than the tables
    heard = []
    loop = Loop(rank, run_dir, flush_seconds=0.0, on_finding=heard.append)
    if not kill:  # from a checkpoint
        with torch.no_grad():
            next(loop.ddp.parameters()).mul_(0.5)
    for step in range(num_steps):
        loop.step(step, rank=0)
    if kill:
        while last_on_disk(run_dir) < num_steps - 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    loop.scope.close()
    findings = [finding.to_json() for finding in loop.scope.findings]
    return loop.scope.latest.step, findings, heard, loop.warnings


def train_beside(rank, run_dir):
    opening._PREVIOUS_SECONDS = 0.1  # for which the second run waits for the end of the first
    loops = [Loop(rank, run_dir)]
    loops[0].step(0)
    while rank == 0 and "agent" not in Run.open(run_dir).info:
        time.sleep(0.05)
    dist.barrier()
    loops.append(Loop(rank, run_dir))
    for loop in loops:
        loop.step(1)
        loop.close()
    return loops[1].warnings


def test_a_run_that_is_still_trained_is_not_continued(tmp_path):
    warnings, _ = run_ranks(train_beside, 2, str(tmp_path / "run"))
    assert "run already holds a run that another job is still training; this" in warnings[0]
    second = Run.open(tmp_path / "run-2")
    assert "continues" not in second.info
    assert second.columns(Table.STEPS, "step")["step"].tolist() == [0]


def test_a_killed_job_goes_on_where_its_detectors_stood(tmp_path):
    with pytest.raises(RankError, match="died"):
        run_ranks(copied_batches, 2, str(tmp_path / "sft"), KILLED_AFTER, True)
    first = Run.open(tmp_path / "sft")
    last = first.columns(Table.STEPS, "step")["step"][-1]
    assert last == KILLED_AFTER - 2  # the books of the last step were still open

    results = run_ranks(copied_batches, 2, str(tmp_path / "sft"), 10, False)
    second = Run.open(tmp_path / "sft-2")
    assert (second.info["continues"], second.info["first_step"]) == ("sft", last + 1)
    assert second.info["after_complete"] is (first.status == "complete")
    assert read_state(second.path / START_FILE)["num_steps"] == last + 1
    steps = second.columns(Table.STEPS, "step")["step"]
    assert steps.tolist() == list(range(last + 1, last + 11))
    recorded = [finding.to_json() for finding in second.findings()]
    assert recorded == [finding.to_json() for finding in diagnose_run(second)]
    assert read_state(second.path / STATE_FILE)["num_steps"] == last + 11
    for latest, findings, heard, _ in results:
        assert latest == last + 10
        assert findings == recorded
        assert {finding.step > last for finding in heard} <= {True}
    [duplicates] = [f for f in second.findings() if f.cause == "data.duplicate_batches"]
    assert (duplicates.first_step, duplicates.last_step) == (0, last + 10)
    assert duplicates.evidence["steps"] == last + 11
    assert [len(warnings) for *_, warnings in results] == [1, 0]


def few_steps(rank, run_dir):
    loop = Loop(rank, run_dir)
    return loop.train(3), loop.scope.latest.step


def test_a_restart_that_cannot_go_on_starts_anew_on_all_ranks(tmp_path):
    assert run_ranks(few_steps, 1, str(tmp_path / "run")) == [([], 2)]
    (warnings, last), other = run_ranks(few_steps, 2, str(tmp_path / "run"))
    assert (last, other[1]) == (2, 2)
    assert "it had 1 workers, this job has 2" in warnings[0]
    (tmp_path / "run-2" / STATE_FILE).write_bytes(b"torn")
    (warnings, last), other = run_ranks(few_steps, 2, str(tmp_path / "run"))
    assert (last, other[1]) == (2, 2)
    assert "damaged" in warnings[0]
    assert "continues" not in Run.open(tmp_path / "run-3").info
    (_, last), other = run_ranks(few_steps, 2, str(tmp_path / "run"))
    assert (last, other[1]) == (5, 5)
    assert Run.open(tmp_path / "run-4").info["continues"] == "run-3"


def seen_live(rank, run_dir):
    seen = []
    loop = Loop(rank, run_dir, tier="sketch", every=2)
    if rank == 0:
        diagnosis = root_of(loop)._diagnosis
        observe_many = diagnosis.observe_many

        def listen(reports):
            seen.extend(map(as_recorded, reports))
            return observe_many(reports)

        diagnosis.observe_many = listen
    for step in range(9):
        for micro in range(1 + step % 3):
            last = micro == step % 3
            with contextlib.nullcontext() if last else loop.ddp.no_sync():
                loop.forward(10 * step + micro).backward()
        loop.update()
    loop.scope.close()
    return seen, [finding.to_json() for finding in loop.scope.findings]


def test_the_record_holds_what_detectors_saw(tmp_path):
    results = run_ranks(seen_live, 3, str(tmp_path / "run"))
    run = Run.open(tmp_path / "run")
    recorded = list(run.iter_reports())
    assert len(recorded) == 9
    assert any(report.gathered.micro_losses for report in recorded)
    assert any(report.gathered.micro_norms for report in recorded)
    assert any(report.cosines_WW is not None for report in recorded)
    for read, live in zip(recorded, results[0][0], strict=True):
        assert_same(read, live)
    for _, findings in results:
        assert findings == [finding.to_json() for finding in diagnose_run(run)]


# What the optimizer and random generators hold --------------------------------------------------

STEPS = 5


class Noisy(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.generator = torch.Generator().manual_seed(rank)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x):
        x = x + 0.1 * torch.randn(x.shape, generator=self.generator)
        return self.layers[1](self.layers[0](x).tanh()).square().mean()


def train(rank, run_dir, sharded, saved=None, *, copied=False, lost=()):
    torch.manual_seed(0)
    net = Noisy(rank)
    if sharded:
        fully_shard(net.layers[1])
    model = fully_shard(net) if sharded else DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    if saved is not None:
        parameters, moments, random = copy.deepcopy(saved)
        own = [random]
        if sharded:
            own = [state["exp_avg"].to_local() for state in moments["state"].values()]
        for tensor in own if copied else ():
            dist.broadcast(tensor, src=0)
        for number in lost:
            del moments["state"][number]
        net.load_state_dict(parameters)
        optimizer.load_state_dict(moments)
        net.generator.set_state(random)
    with watch(model, optimizer, run_dir=run_dir, canary=False):
        for _ in range(STEPS):
            model(torch.randn(4, 6)).backward()
            optimizer.step()
            net.zero_grad()
        states = net.state_dict(), optimizer.state_dict()
        return *copy.deepcopy(states), net.generator.get_state()


KINDS = {"DDP": False, "FSDP2": True}
LOST = (1, 2)  # of the root, whose shards are gathered while a step begins, and of a layer


def train_all(rank, folder):
    warnings.simplefilter("ignore")
    for kind, sharded in KINDS.items():
        saved = train(rank, f"{folder}/{kind}-first", sharded)
        changes = {kind: {}, f"{kind} of rank 0": {"copied": True}, f"{kind} lost": {"lost": LOST}}
        for name, change in changes.items():
            if rank == 0:
                shutil.copytree(f"{folder}/{kind}-first", f"{folder}/{name}")
            dist.barrier()
            train(rank, f"{folder}/{name}", sharded, saved, **change)


restarted = on_ranks(train_all, 2, timeout=240)


def found_in(restarted, name):
    found = told(Run.open(restarted[1] / f"{name}-2"), "state.", "rng.", "sync.")
    found.pop("rng-begun-again", None)  # each attempt seeds anew
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_right_versions_raise_nothing(restarted, kind):
    assert found_in(restarted, kind) == {}


COPIED = "rank 1 holds rank 0's"


@pytest.mark.parametrize(
    ("kind", "cause", "severity", "text"),
    [
        ("FSDP2", "state.resume_mismatch", Severity.ERROR, f"exp_avg is another rank's: {COPIED}"),
        ("DDP", "rng.resume_mismatch", Severity.WARNING, COPIED),
    ],
)
def test_what_a_restart_loses_is_named(restarted, kind, cause, severity, text):
    found = found_in(restarted, f"{kind} of rank 0")[cause]
    assert (found.severity, found.ranks, found.first_step) == (severity, (1,), STEPS)
    assert text in found.explanation


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_without_their_moments_are_named(restarted, kind):
    found = found_in(restarted, f"{kind} lost")["state.resume_mismatch"]
    assert (found.severity, found.ranks) == (Severity.ERROR, ())
    assert "the moments of 2 parameters (layers.0.bias and layers.1.weight)" in found.explanation

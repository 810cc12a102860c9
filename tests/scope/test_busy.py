"""Which worker the others wait for: ranks that are slow before the reduction begins."""

import time
from pathlib import Path

import numpy as np
import pytest
from torch.nn.parallel import DistributedDataParallel

from rankscope import Run
from rankscope.evidence.timing.judge import WARM_UP, WINDOW
from rankscope.verdict.diagnosis import diagnose_run
from support.comm_hooks import register_comm_hook
from support.loops import Loop
from support.ranks import on_ranks

pytestmark = pytest.mark.ranks

SLEEP = 0.03
LONG_SLEEP = 0.1  # longer than what a busy machine takes from the others in most steps
STEPS = 8
LONG = WARM_UP + 2 * WINDOW + 1


def train(
    run_dir: str,
    rank: int,
    slow: tuple[int, ...],
    num_steps: int,
    seconds: float = SLEEP,
    hook: str = "",
) -> list[str]:
    """Train a model with buffers, which rank 0 broadcasts before each forward pass."""
    loop = Loop(rank, None)
    register_comm_hook(loop.ddp, hook)
    loop.watch(run_dir, canary=False)  # in whose step it is not known who waits for whom
    for step in range(num_steps):
        if rank in slow:
            time.sleep(seconds)
        loop.step(step)
    loop.close()
    return loop.warnings


def train_all(rank: int, folder: str) -> list[str]:
    untouched = DistributedDataParallel._sync_buffers
    warnings = []
    warnings += train(f"{folder}/first slow", rank, (0,), STEPS)
    warnings += train(f"{folder}/last slow", rank, (2,), LONG, LONG_SLEEP)
    warnings += train(f"{folder}/all alike", rank, (0, 1, 2), LONG)
    warnings += train(f"{folder}/hook", rank, (), STEPS, hook="all-reduce")
    if DistributedDataParallel._sync_buffers is not untouched:
        warnings.append("broadcasts are still timed")
    return warnings


trained = on_ranks(train_all, 3)


def busy(folder: Path, name: str) -> np.ndarray:
    return Run.open(folder / name).per_worker("busy_seconds")[1]


@pytest.mark.parametrize(("name", "slow"), [("first slow", 0), ("last slow", 2)])
def test_only_the_slow_rank_is_busy_for_long(trained, name, slow):
    """Wall time is the same on all; rank 0 also makes the others wait for its buffers."""
    assert trained[0] == [[], [], []]
    busy_TW = busy(trained[1], name)
    assert np.isnan(busy_TW[0]).all()
    assert (busy_TW[1:, slow] > SLEEP).all()
    least_W = busy_TW[1:].min(axis=0)  # in some step no other process is in the way
    assert (np.delete(least_W, slow) < least_W[slow]).all()
    seconds_TW = Run.open(trained[1] / name).per_worker("step_seconds")[1]
    assert (np.median(seconds_TW[1:], axis=0) > SLEEP).all()
    assert (busy_TW[2:] < seconds_TW[2:] + seconds_TW[1:-1]).all()


def test_a_note_names_the_rank_that_the_others_wait_for(trained):
    run = Run.open(trained[1] / "last slow")
    [finding] = [f for f in run.findings() if f.cause == "time.straggler"]
    assert (finding.ranks, finding.status, str(finding.severity)) == ((2,), "open", "note")
    assert finding.first_step < WARM_UP + WINDOW
    assert finding.evidence["seconds_behind"] > LONG_SLEEP / 2
    assert diagnose_run(run) == run.findings()


def test_there_is_no_note_when_all_train(trained):
    run = Run.open(trained[1] / "all alike")
    assert np.isfinite(run.per_worker("busy_seconds")[1][1:]).all()
    assert [f for f in run.findings() if f.cause == "time.straggler"] == []


def test_with_a_communication_hook_nothing_is_known(trained):
    """It may wait inside the backward pass."""
    assert np.isnan(busy(trained[1], "hook")).all()

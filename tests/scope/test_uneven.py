import time

import numpy as np
import pytest
from torch.nn.parallel import DistributedDataParallel

from rankscope import Run
from rankscope.bus.evidence import Table
from rankscope.evidence.timing.judge import WARM_UP, WINDOW
from rankscope.verdict.diagnosis import diagnose_run
from support.comm_hooks import register_comm_hook
from support.loops import Loop
from support.ranks import alone_and_watched, on_ranks

pytestmark = pytest.mark.ranks

# Which worker the others wait for: ranks that are slow before the reduction begins --------------

SLEEP = 0.03
LONG_SLEEP = 0.1  # longer than what a busy machine takes from the others in most steps
STEPS = 8
LONG = WARM_UP + 2 * WINDOW + 1


def train_slowly(run_dir, rank, slow, num_steps, seconds=SLEEP, hook=""):
    loop = Loop(rank, None)
    register_comm_hook(loop.ddp, hook)
    loop.watch(run_dir, canary=False)  # in whose step it is not known who waits for whom
    for step in range(num_steps):
        if rank in slow:
            time.sleep(seconds)
        loop.step(step)
    loop.close()
    return loop.warnings


def train_all(rank, folder):
    untouched = DistributedDataParallel._sync_buffers
    warnings = train_slowly(f"{folder}/first slow", rank, (0,), STEPS)
    warnings += train_slowly(f"{folder}/last slow", rank, (2,), LONG, LONG_SLEEP)
    warnings += train_slowly(f"{folder}/all alike", rank, (0, 1, 2), LONG)
    warnings += train_slowly(f"{folder}/hook", rank, (), STEPS, hook="all-reduce")
    if DistributedDataParallel._sync_buffers is not untouched:
        warnings.append("broadcasts are still timed")
    return warnings


trained = on_ranks(train_all, 3)


@pytest.mark.parametrize(("name", "slow"), [("first slow", 0), ("last slow", 2)])
def test_only_the_slow_rank_is_busy_for_long(trained, name, slow):
    """Wall time is the same on all; rank 0 also makes the others wait for its buffers."""
    assert trained[0] == [[], [], []]
    run = Run.open(trained[1] / name)
    _, busy_TW = run.per_worker("busy_seconds")
    assert np.isnan(busy_TW[0]).all()
    assert (busy_TW[1:, slow] > SLEEP).all()
    least_W = busy_TW[1:].min(axis=0)  # in some step no other process is in the way
    assert (np.delete(least_W, slow) < least_W[slow]).all()
    _, seconds_TW = run.per_worker("step_seconds")
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
    run = Run.open(trained[1] / "hook")  # which may wait inside the backward pass
    assert np.isnan(run.per_worker("busy_seconds")[1]).all()


# Uneven inputs: ranks that have run out of data shadow the steps of the others in ``join()`` ----

NUM_STEPS = (5, 3, 4)
"""Steps for which each rank has data, in each of two epochs."""

WAYS = ("plain", "bucket views", "micro-batches")


def train_unevenly(rank, way, run_dir):
    loop = Loop(rank, run_dir, ddp={"gradient_as_bucket_view": way == "bucket views"})
    losses, norms = [], []
    for epoch in range(2):
        with loop.ddp.join():
            for step in range(NUM_STEPS[rank]):
                number = 100 * epoch + 2 * step
                batches = (number, number + 1) if way == "micro-batches" else (number + 1,)
                norms.append(loop.exact_norm(*batches))
                if way == "micro-batches":
                    with loop.ddp.no_sync():
                        loop.forward(number).backward()
                loss = loop.forward(number + 1)
                loss.backward()
                losses.append(loss.item())
                loop.update()
    loop.close()
    assert loop.warnings == []
    return {"losses": losses, "norms": norms, "bits": loop.bits()}


joined = alone_and_watched(train_unevenly, WAYS, 3)


@pytest.mark.parametrize("way", WAYS)
def test_the_steps_of_the_others_go_on(joined, way):
    results, folder = joined
    run = Run.open(folder / way)
    assert run.status == "complete"
    present_TW = np.array([[step < n for n in NUM_STEPS] for step in range(max(NUM_STEPS))])
    present_TW = np.concatenate([present_TW, present_TW])
    observed = run.columns(Table.STEPS, "observed")["observed"].astype(bool)
    assert observed.tolist() == present_TW.all(axis=1).tolist()
    for rank, by_way in enumerate(results):
        alone, watched = by_way[way]
        assert alone["bits"] == watched["bits"], rank
        assert alone["losses"] == watched["losses"]
    _, samples_TW = run.per_worker("num_samples")
    per_step = 6 if way == "micro-batches" else 3
    assert np.nan_to_num(samples_TW).tolist() == (per_step * present_TW).tolist()
    for name in ("loss", "grad_norm"):
        _, values_TW = run.per_worker(name)
        assert np.isfinite(values_TW).tolist() == present_TW.tolist()
    for norms_T, present_T, by_way in zip(values_TW.T, present_TW.T, results, strict=True):
        np.testing.assert_allclose(norms_T[present_T], by_way[way][1]["norms"], rtol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_that_has_run_out_of_data_is_not_said_to_differ(joined, way):
    """It makes no optimizer step, so its momenta do differ from the second epoch on."""
    found = Run.open(joined[1] / way).findings()
    kinds = ("sync.", "state.parameters", "state.optimizer", "state.hyper")
    told = [finding for finding in found if finding.cause.startswith(kinds)]
    assert all(finding.first_step >= max(NUM_STEPS) for finding in told)
    assert {finding.cause for finding in told} >= {"state.optimizer_differs"}

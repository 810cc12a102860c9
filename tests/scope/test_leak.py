import contextlib
import gc
import itertools
import logging
import os
import sys
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope import Run
from rankscope.bus.evidence import Table
from rankscope.gradients.sketch import MultiTensorReader, Sketcher
from rankscope.report import write_report
from support.loops import Loop, bits_of, collect_warnings, wait_for, watch
from support.ranks import on_ranks, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

# Memory -----------------------------------------------------------------------------------------

STEPS, COUNTED_AFTER = 480, (120, 240, 360, 480)


def train(rank, run_dir):
    warnings = collect_warnings()
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    inputs = torch.randn(2, 4)
    counts = []
    with watch(ddp, optimizer, run_dir=run_dir, sketch_width=31, every=10) as scope:
        for step in range(STEPS):
            ddp(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 40 == 39:
                wait_for(scope, step - 1)  # the books of a step close when the next begins
            if step + 1 in COUNTED_AFTER:
                if scope._handle.agent is not None:
                    scope._handle.agent.agent.root._record.flush()
                counts.append(count())
    assert warnings == []
    return counts


def count():
    gc.collect()
    objects = gc.get_objects()
    return {
        "objects": len(objects),
        "types": Counter(type(thing).__qualname__ for thing in objects),
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in objects),
        "bytes": int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
    }


@pytest.mark.timeout(280)
def test_nothing_grows_with_the_number_of_steps(tmp_path):
    for rank, counted in enumerate(run_ranks(train, 2, str(tmp_path / "run"), timeout=270)):
        early, *later = counted
        # What is loaded once, such as a module, makes one difference large: a leak makes all.
        grown = [after["objects"] - before["objects"] for before, after in pairwise(counted)]
        assert median(grown) <= 24, (later[-1]["types"] - early["types"]).most_common(20)
        for counts in later:
            assert counts["tensors"] <= early["tensors"] + 10
            # Rank 0 also holds the Parquet parts that still grow, up to a fixed size each.
            assert counts["bytes"] <= early["bytes"] + (8 if rank else 48) * 2**20
    run = Run.open(tmp_path / "run")
    assert run.table(Table.STEPS).num_rows == STEPS
    assert run.status == "complete"


# Runs one after the other ------------------------------------------------------------------------

RUNS, WARM_RUNS, STEPS_OF_RUN = 12, 4, 8


def train_in_turn(rank, folder):
    warnings = collect_warnings()
    counts = []
    for number in range(RUNS):
        torch.manual_seed(number)
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        calls = []
        with watch(ddp, optimizer, run_dir=f"{folder}/run", sketch_width=31) as scope:
            for step in range(STEPS_OF_RUN):
                seed = torch.Generator().manual_seed(10 * step + rank)
                with called() as seen:
                    ddp(torch.randn(2, 4, generator=seed)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                calls.append(seen["calls"])
        del ddp, optimizer, scope
        left = {
            "files": len(list(Path("/proc/self/fd").iterdir())),
            "threads": threading.active_count(),
        }
        counts.append({**count(), **left, "calls": min(calls)})
    assert [one for one in warnings if "already holds a run" not in one] == []
    return counts


@contextlib.contextmanager
def called():
    seen = Counter()

    def see(frame, event, given):
        seen["calls"] += event == "call"

    sys.setprofile(see)
    try:
        yield seen
    finally:
        sys.setprofile(None)


@pytest.mark.timeout(600)
def test_nothing_grows_with_the_number_of_runs_in_a_process(tmp_path):
    for counted in run_ranks(train_in_turn, 2, str(tmp_path), timeout=580):
        warm = counted[WARM_RUNS - 1 :]
        early, late = warm[0], warm[-1]
        grown = [after["objects"] - before["objects"] for before, after in pairwise(warm)]
        assert median(grown) <= 3, (late["types"] - early["types"]).most_common(20)  # its counts
        assert late["tensors"] <= early["tensors"] + 2
        assert late["files"] <= early["files"]
        assert late["threads"] <= early["threads"]
        assert late["bytes"] <= early["bytes"] + 8 * 2**20
        assert late["calls"] <= 1.1 * early["calls"]


# Secrets ----------------------------------------------------------------------------------------

CANARY = "tell-nobody"
VARIABLES = {
    "HF_TOKEN": CANARY,
    "HF_ENDPOINT": f"https://me:{CANARY}/x@example.org/{CANARY}?sig={CANARY}",
    "AWS_ACCESS_KEY_ID": CANARY,
    "TORCH_AUTHORIZATION": CANARY,
    "NCCL_PASSPHRASE": CANARY,
    "ACCELERATE_SSH_KEY": CANARY,
    "DATABASE_URL": f"postgres://me:{CANARY}@example.org/db",
}
CONFIG = {
    "hub_token": CANARY,
    "endpoint": f"https://me:p/{CANARY}@example.org/{CANARY}?token={CANARY}",
    "nested": [{"Authorization": f"Bearer {CANARY}"}],
    "command": f"train.py --api_key {CANARY}",
    "lr": 0.5,
}


def train_beside_secrets(rank, folder):
    os.environ |= {name: f"{value}{rank}" for name, value in VARIABLES.items()}
    os.environ["NCCL_ALGO"] = f"of rank {rank}"
    logging.getLogger("rankscope").setLevel(logging.DEBUG)
    hook = f"webhook:http://127.0.0.1:9/{CANARY}?severity=error"
    loop = Loop(rank, f"{folder}/run", agent="process", config=CONFIG, sinks=["jsonl", hook])
    return loop.train(4)


def test_no_secret_is_recorded_or_shown(tmp_path):
    warnings = run_ranks(train_beside_secrets, 2, str(tmp_path))
    run = Run.open(tmp_path / "run")
    assert run.status == "complete"
    assert run.info["config"]["lr"] == 0.5
    assert [rank["environment"]["NCCL_ALGO"] for rank in run.info["ranks"]] == [
        "of rank 0", "of rank 1"
    ]  # fmt: skip
    write_report(run)
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert run.path / "report.html" in files
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
    assert CANARY not in str(warnings)


# Many parameters --------------------------------------------------------------------------------

FEW, MANY = 20, 400
FEW_STEPS = 5


def train_many(number, rank, run_dir, *, zeroed):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(number)])
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=zeroed)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    with watch(ddp, optimizer, run_dir=run_dir):
        for step in range(FEW_STEPS):
            inputs = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            ddp(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not zeroed)
    return bits_of(model)


def count_calls(rank, folder):
    calls = {"prepared": 0, "read": 0}
    prepare, read = MultiTensorReader.__init__, Sketcher.measure_tensors

    def prepared(*args, **options):
        calls["prepared"] += 1
        prepare(*args, **options)

    def counted(*args, **options):
        calls["read"] += 1
        read(*args, **options)

    MultiTensorReader.__init__, Sketcher.measure_tensors = prepared, counted
    found = {way: {"counts": [], "same": []} for way in (False, True)}
    for zeroed, number in itertools.product(found, (FEW, MANY)):
        calls.update(prepared=0, read=0)
        alone = train_many(number, rank, None, zeroed=zeroed)
        watched = train_many(number, rank, f"{folder}/{number} {zeroed}", zeroed=zeroed)
        found[zeroed]["counts"].append(dict(calls))
        found[zeroed]["same"].append(alone == watched)
    return found


counted = on_ranks(count_calls, 2)


@pytest.mark.parametrize("zeroed", [False, True], ids=["made anew", "zeroed in their buckets"])
def test_many_small_gradients_are_read_in_as_few_calls_as_few(counted, zeroed):
    for found in (rank[zeroed] for rank in counted[0]):
        few, many = found["counts"]
        assert few["read"] > FEW_STEPS
        assert many == few
        assert found["same"] == [True, True]

"""Hundreds of watched steps leave no object, no tensor and no memory behind."""

import gc
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import Run
from rankscope.bus.evidence import Table
from support.loops import collect_warnings, wait_for
from support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STEPS = 480
COUNTED_AFTER = (120, 240, 360, 480)
_PAGE_BYTES = 4096


def train(rank: int, run_dir: str) -> dict[str, Any]:
    warnings = collect_warnings()
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    inputs = torch.randn(2, 4)
    options = {"overhead_budget": None, "sketch_width": 31, "every": 10}
    counts = []
    with rankscope.watch(ddp, optimizer, run_dir=run_dir, **options) as scope:
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
    return {"warnings": warnings, "counts": counts}


def count() -> dict[str, Any]:
    gc.collect()
    objects = gc.get_objects()
    return {
        "objects": len(objects),
        "types": Counter(type(thing).__qualname__ for thing in objects),
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in objects),
        "bytes": int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES,
    }


@pytest.mark.timeout(280)
def test_nothing_grows_with_the_number_of_steps(tmp_path):
    for number, rank in enumerate(run_ranks(train, 2, str(tmp_path / "run"), timeout=270)):
        assert rank["warnings"] == []
        early, *later = rank["counts"]
        # What is loaded once, such as a module, makes one difference large: a leak makes all.
        grown = [after["objects"] - before["objects"] for before, after in pairwise(rank["counts"])]
        assert median(grown) <= 24, (later[-1]["types"] - early["types"]).most_common(20)
        for counts in later:
            assert counts["tensors"] <= early["tensors"] + 10
            # Rank 0 also holds the Parquet parts that still grow, up to a fixed size each.
            assert counts["bytes"] <= early["bytes"] + (8 if number else 48) * 2**20
    run = Run.open(tmp_path / "run")
    assert run.table(Table.STEPS).num_rows == STEPS
    assert run.status == "complete"

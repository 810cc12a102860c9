"""A worker that differs, in a job on real ranks: by callback, live, and from the record."""

import time

import torch

from rankscope import Run
from rankscope.bus.finding import Severity
from rankscope.verdict.diagnosis import diagnose_run
from support.loops import Loop
from support.models import make_batch
from support.ranks import run_ranks

FAULTY, FIRST, STEPS = 2, 40, 90


def bad_labels(rank, run_dir):
    """Train to repeat the input; from one step on, one rank's labels are other tokens."""
    loop = Loop(rank, None)
    told = []
    loop.watch(run_dir, on_finding=told.append)
    seen = None
    for step in range(STEPS):
        batch = make_batch(rank, step)
        off = 7 if rank == FAULTY and step >= FIRST else 0
        targets = (batch["input_ids"] + off) % 50
        batch["labels"] = torch.where(batch["labels"] < 0, batch["labels"], targets)
        loop.ddp(**batch)["loss"].backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        while step and (loop.scope.latest is None or loop.scope.latest.step < step - 1):
            time.sleep(0.001)  # the monitor may lag behind so small a model
        if seen is None and any(finding.severity >= Severity.WARNING for finding in told):
            seen = step
    loop.close()
    return seen, [finding.to_json() for finding in loop.scope.findings], loop.warnings


def test_a_worker_with_bad_labels_is_named_in_the_training_process(tmp_path):
    results = run_ranks(bad_labels, 4, str(tmp_path / "run"))
    run = Run.open(tmp_path / "run")
    recorded = [finding.to_json() for finding in run.findings()]
    assert recorded == [finding.to_json() for finding in diagnose_run(run)]
    for seen, findings, warnings in results:
        assert findings == recorded
        assert warnings == []
        assert seen is not None
        assert FIRST < seen < FIRST + 30
    [outlier] = [finding for finding in run.findings() if finding.severity >= Severity.WARNING]
    assert (outlier.cause, outlier.ranks) == ("data.worker_outlier", (FAULTY,))
    assert abs(outlier.first_step - FIRST) <= 3
    assert "loss" in outlier.explanation

"""Secrets that lie around a training are in nothing that is recorded of it."""

import logging
import os

import pytest

from rankscope import Run
from rankscope.report import write_report
from support.loops import Loop
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

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


def train(rank, folder):
    """Train with other secrets on each rank, so that what differs is told."""
    os.environ |= {name: f"{value}{rank}" for name, value in VARIABLES.items()}
    os.environ["NCCL_ALGO"] = f"of rank {rank}"
    logging.getLogger("rankscope").setLevel(logging.DEBUG)
    hook = f"webhook:http://127.0.0.1:9/{CANARY}?severity=error"
    loop = Loop(rank, f"{folder}/run", agent="process", config=CONFIG, sinks=["jsonl", hook])
    for step in range(4):
        loop.step(step)
    loop.close()
    return loop.warnings


def test_no_secret_is_recorded_or_shown(tmp_path):
    warnings = run_ranks(train, 2, str(tmp_path))
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

"""The part of `make gpu` for several GPUs, over gloo: every answer, and the block for an issue."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_dry_run_finds_every_fault_and_the_hang_and_prints_one_block():
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/gpu.py", "--dry-run", "--parts", "nccl", "--seconds=1"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "RANKSCOPE_AGENT": "thread"},
        text=True, stdout=subprocess.PIPE, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    block = done.stdout.split("Please paste this into an issue:")[1]
    rows = [line.strip("| ").split(" | ") for line in block.splitlines() if line.startswith("| ")]
    answers = dict(rows[1:])
    assert answers.pop("same bits with and without it") == "2 of 2 ranks"
    assert "% of steps observed" in answers.pop("step, watched over unwatched")
    hang = answers.pop("a hang, one rank missing")
    assert "rank 1 has not entered it" in hang
    assert len(answers) == 6
    assert all(answer.startswith("found: ") for answer in answers.values()), answers

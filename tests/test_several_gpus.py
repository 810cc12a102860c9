"""The part of `make gpu` for several GPUs, over gloo: every answer, and the block for an issue."""

import os
import subprocess
import sys
from unittest.mock import patch

import pytest

from support.benchmarks import load_benchmark
from support.forked_ranks import run_on_ranks

gpu = load_benchmark("gpu")


@pytest.mark.slow
@pytest.mark.ranks
def test_a_dry_run_finds_every_fault_and_the_hang_and_prints_one_block(monkeypatch, tmp_path):
    ended = []

    def run(words, *, check):
        """Do as the launcher does, with ranks that are forked."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        assert words[:5] == [sys.executable, *launcher]
        assert not check
        ended.append(run_on_ranks(2, words[5:], tmp_path, script=True, CUDA_VISIBLE_DEVICES=""))
        return subprocess.CompletedProcess(words, ended[0][0])

    monkeypatch.setattr(gpu.subprocess, "run", run)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with patch.dict(os.environ):
        code = gpu.main(["--dry-run", "--parts", "nccl", "--seconds=1"])
    ((_, printed, said),) = ended
    assert code == 0, said
    block = printed.split("Please paste this into an issue:")[1]
    rows = [line.strip("| ").split(" | ") for line in block.splitlines() if line.startswith("| ")]
    answers = dict(rows[1:])
    assert answers.pop("same bits with and without it") == "2 of 2 ranks"
    assert "% of steps observed" in answers.pop("step, watched over unwatched")
    hang = answers.pop("a hang, one rank missing")
    assert "rank 1 has not entered it" in hang
    assert len(answers) == 6
    assert all(answer.startswith("found: ") for answer in answers.values()), answers

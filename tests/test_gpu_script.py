import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from support.benchmarks import load_benchmark
from support.forked_ranks import run_on_ranks

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
PAGE = ROOT / "docs" / "performance.md"
page = load_benchmark("gpu_page")
TRIED = {name: part for name, part in page.PARTS.items() if name != "study"}
"""All parts but the study's, which is one call of what has tests of its own."""


def written():
    return [path.read_bytes() for path in (PAGE, PAGE.with_suffix(".json"))]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_dry_run_goes_through_every_row_and_writes_nothing():
    before = written()
    command = [sys.executable, SCRIPT, "--dry-run", "--parts", ",".join(TRIED)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE, timeout=280, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert "failed" not in done.stdout
    assert done.returncode == 0
    for name, part in TRIED.items():
        of_it = [line.removeprefix(f"[{name}] ") for line in lines if line.startswith(f"[{name}]")]
        for what in part.rows:
            assert any(line.startswith(f"{what}: ") for line in of_it), f"{name}: {what}"
        assert of_it[-1].startswith(f"{len(part.rows)} rows, ")
    answers = [line.rsplit(": ", 1)[1] for line in lines if " equal" in line or "same bits" in line]
    assert len(answers) == 11
    for answer in answers:
        assert answer == "yes" or len({*answer.split(" of ")}) == 1, lines
    assert written() == before


def test_without_an_accelerator_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = written()
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        assert load_benchmark("gpu").main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Nothing was measured: torch ")
    assert said.count("\n") == 1
    assert written() == before


gpu = load_benchmark("gpu")


@pytest.mark.slow
@pytest.mark.ranks
def test_a_dry_run_finds_every_fault_and_the_hang_and_prints_one_block(monkeypatch, tmp_path):
    ended = []

    def run(words, *, check):
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
    assert "rank 1 has not entered it" in answers.pop("a hang, one rank missing")
    assert len(answers) == 6
    assert all(answer.startswith("found: ") for answer in answers.values()), answers

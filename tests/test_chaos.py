"""Two accidents of ``make chaos``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUSY = {"RANKSCOPE_CHAOS_PATIENCE": "12"}
"""Other tests run beside it: its bounds of time are those of a quiet machine."""


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_ranks_and_a_killed_agent_keep_their_promises():
    ended = subprocess.run(
        [sys.executable, "benchmarks/chaos.py", "--quick", "--only", "kill"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **BUSY},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert said.count("good") == 2, said

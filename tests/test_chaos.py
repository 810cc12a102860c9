"""Two accidents of ``make chaos``, and that broken promises would be seen."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support.benchmarks import load_benchmark

ROOT = Path(__file__).parents[1]
BUSY = {"RANKSCOPE_CHAOS_PATIENCE": "12"}
"""Other tests run beside it: its bounds of time are those of a quiet machine."""


@pytest.fixture(scope="module")
def chaos():
    return load_benchmark("chaos")


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


@pytest.fixture
def kept(chaos):
    """What an accident that does no harm leaves, of a training that is promised all steps."""
    steps = list(range(chaos.STEPS))
    return chaos.Outcome([0, 0], ["same"] * 2, [chaos.STEPS] * 2, 1.0, "", [], steps, "complete")


@pytest.mark.parametrize(
    ("change", "seconds", "word"),
    [
        ({"exits": [0, None]}, 0.0, "hangs"),
        ({"bits": ["same", "other"]}, 0.0, "other bits"),
        ({}, 1000.0, "longer"),
    ],
)
def test_harm_is_seen(chaos, kept, change, seconds, word):
    kind = next(kind for kind in chaos.KINDS if kind.hits is chaos.Hits.MONITOR)
    assert list(chaos.harm(kind, kept, kept, 0.0)) == []
    [harm] = chaos.harm(kind, replace(kept, **change), kept, seconds)
    assert word in harm

"""The example as its first lines say to start it, with files and a command."""

import json
from pathlib import Path

import pytest

from support.forked_ranks import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "sinks.py"
COMMAND = 'command:echo "$RANKSCOPE_SEVERITY $RANKSCOPE_CAUSE $RANKSCOPE_EVENT"'


@pytest.mark.ranks
def test_the_example_tells_of_its_fault(tmp_path):
    assert COMMAND in EXAMPLE.read_text()
    options = ["--steps", "20", "--forget-sampler", "--slowest", "--sink", "jsonl"]
    command = [str(EXAMPLE), "--run-dir", "run", *options, "--sink", COMMAND]
    code, out, err = torchrun(["--nproc-per-node", "2"], *command, folder=tmp_path)
    assert code == 0, err
    lines = out.splitlines()
    assert [line for line in lines if line.endswith("opened")] == [
        "error data.duplicate_batches opened"
    ]
    [counts] = [line for line in lines if line.startswith("slowest")]
    counted = sum(json.loads(counts.partition(": ")[2]))
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, rows) if "step" in row]
    busy = [row for row in steps if "rankscope_workers/busy_seconds/max" in row]
    assert len(steps) == 20
    assert counted == len(busy) > 10

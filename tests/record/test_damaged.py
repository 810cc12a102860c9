"""Run directories as accidents leave them: each is refused in words, and nothing is waited for."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fuzz.readers import forked
from rankscope.bus.evidence import Table
from rankscope.errors import RunError
from rankscope.record import Run
from report.recorded_runs import record_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return record_run(tmp_path / "run", num_steps=4).path


def steps_of(run: Path) -> Path:
    return next((run / "steps").glob("part-*.parquet"))


def read_all(run: Path) -> None:
    opened = Run.open(run)
    opened.findings()
    opened.table(Table.STEPS)


CHANGES: dict[str, Callable[[pa.Table], pa.Table]] = {
    "a column twice": lambda rows: rows.append_column("step", rows["step"]),
    "no step": lambda rows: rows.drop_columns(["step"]),
    "null": lambda rows: rows.set_column(0, "step", pa.nulls(len(rows), pa.int64())),
    "nested": lambda rows: rows.set_column(0, "step", pa.array([[1]] * len(rows))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_steps_that_are_none(run: Path, change: str):
    file = steps_of(run)
    pq.write_table(CHANGES[change](pq.read_table(file)), file)

    with pytest.raises(RunError, match="it is damaged"):
        Run.open(run).table(Table.STEPS)


DEEP = "[" * 200_000 + "]" * 200_000
FINDING = {
    "id": "a",
    "cause": "b",
    "severity": "note",
    "ranks": [0],
    "first_step": 0,
    "last_step": 0,
    "explanation": "c",
    "next_check": "d",
}


def test_json_that_is_deep(run: Path):
    (run / "findings.jsonl").write_text(f"{DEEP}\n{json.dumps(FINDING)}\n")
    with pytest.raises(RunError, match="line 1 is not a finding"):
        Run.open(run).findings()
    (run / "run.json").write_text(DEEP)
    with pytest.raises(RunError, match="nested too deep"):
        Run.open(run)


@pytest.mark.parametrize(
    "entry",
    [
        *({"first_step": float("inf")}, {"ranks": [10**30]}),
        *({"evidence": [1]}, {"groups": [1, None]}),
    ],
)
def test_findings_of_other_types(run: Path, entry: dict[str, object]):
    (run / "findings.jsonl").write_text(json.dumps({**FINDING, **entry}) + "\n\n")
    with pytest.raises(RunError, match="line 1 is not a finding"):
        Run.open(run).findings()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("run.json", "pipe"), ("findings.jsonl", "loop"), ("steps/part-000000.parquet", "pipe")],
)
def test_no_file_is_waited_for(run: Path, tmp_path: Path, name: str, kind: str):
    file = run / name
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(file)

    def read() -> None:
        with pytest.raises(RunError, match="cannot read"):
            read_all(run)

    assert forked(read, tmp_path / "err") is None


SHORT_OF_MEMORY = """
import os, resource, sys
from pathlib import Path
from rankscope import Run
from rankscope.errors import RunError

run = Run.open(sys.argv[1])
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**26,) * 2)
try:
    run.columns("steps", "step")
except RunError as error:
    print(error, flush=True)
os._exit(0)  # Arrow's threads may find no memory to end in
"""


def test_a_lack_of_memory_is_no_damage(run: Path):
    count = 16_000_000
    steps = pa.table({"step": pa.array(np.arange(count)), "time": pa.array(np.zeros(count))})
    pq.write_table(steps, steps_of(run), compression="zstd")
    ended = subprocess.run(  # a process of its own, which has no memory left over from before
        [sys.executable, "-c", SHORT_OF_MEMORY, str(run)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "not enough memory" in ended.stdout
    assert "damaged" not in ended.stdout
    assert "remove" not in ended.stdout

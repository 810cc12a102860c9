"""Run directories as accidents leave them: each is refused in words, and nothing is waited for."""

import os
import subprocess
import sys

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
def run(tmp_path):
    return record_run(tmp_path / "run", num_steps=4).path


def steps_of(run):
    return next((run / "steps").glob("part-*.parquet"))


def read_all(run):
    opened = Run.open(run)
    opened.findings()
    opened.table(Table.STEPS)


CHANGES = {
    "a column twice": lambda rows: rows.append_column("step", rows["step"]),
    "no step": lambda rows: rows.drop_columns(["step"]),
    "null": lambda rows: rows.set_column(0, "step", pa.nulls(len(rows), pa.int64())),
    "nested": lambda rows: rows.set_column(0, "step", pa.array([[1]] * len(rows))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_steps_that_are_none(run, change):
    file = steps_of(run)
    pq.write_table(CHANGES[change](pq.read_table(file)), file)

    with pytest.raises(RunError, match="it is damaged"):
        Run.open(run).table(Table.STEPS)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("run.json", "pipe"), ("findings.jsonl", "loop"), ("steps/part-000000.parquet", "pipe")],
)
def test_no_file_is_waited_for(run, tmp_path, name, kind):
    file = run / name
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(file)

    def read():
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


def test_a_lack_of_memory_is_no_damage(run):
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

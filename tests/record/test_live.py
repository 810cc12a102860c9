"""Runs that are read while another process writes them, and runs whose writer is killed."""

import contextlib
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pytest

from rankscope.record import Run
from record.step_reports import expected_steps, expected_workers

WRITER = Path(__file__).with_name("steady_writer.py")
PART_BYTES = 200_000  # a part ends about every twenty steps
NUM_WORKERS = 4


@contextlib.contextmanager
def steady_writer(path: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, str(WRITER), str(path), str(PART_BYTES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_steps_with_duckdb(path: Path) -> list[int]:
    return [row[0] for row in duckdb.sql(f"select step from '{path}/steps/*.parquet'").fetchall()]


def read_steps_with_pandas(path: Path) -> list[int]:
    return pd.read_parquet(path / "steps")["step"].tolist()


def read_steps_with_polars(path: Path) -> list[int]:
    return pl.read_parquet(f"{path}/steps/*.parquet")["step"].to_list()


def read_steps_with_run(path: Path) -> list[int]:
    return [step.step for step in Run.open(path).iter_reports()]


READERS = (
    read_steps_with_duckdb,
    read_steps_with_pandas,
    read_steps_with_polars,
    read_steps_with_run,
)


def test_a_reader_beside_the_writer_sees_all_flushed_steps_once(tmp_path):
    path = tmp_path / "run"
    flushed = 0
    with steady_writer(path) as process:

        def follow() -> None:
            nonlocal flushed
            for line in process.stdout:
                flushed = int(line)

        process.stdout.readline()
        thread = threading.Thread(target=follow)
        thread.start()
        while flushed < 60:
            assert process.poll() is None
            for read_steps in READERS:
                at_least = flushed
                steps = read_steps(path)
                assert sorted(steps) == list(range(len(steps)))
                assert len(steps) >= at_least
        process.kill()
        thread.join()


def kill_at_random(path: Path, seed: int) -> int:
    """Let a writer work, kill it at some moment, and return the steps it said were flushed."""
    rng = random.Random(seed)
    enough = rng.randrange(1, 60)
    with steady_writer(path) as process:
        timer = threading.Timer(0.0, process.kill)
        for line in process.stdout:
            flushed = int(line)
            if flushed == enough:
                timer = threading.Timer(rng.uniform(0.0, 0.05), process.kill)
                timer.start()
        timer.join()
    assert process.returncode == -signal.SIGKILL
    return flushed


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_writer_leaves_whole_tables(tmp_path, seed):
    path = tmp_path / "run"
    flushed = kill_at_random(path, seed)

    steps = pl.read_parquet(f"{path}/steps/*.parquet").to_dicts()
    assert flushed <= len(steps) <= flushed + 1
    assert steps == expected_steps(len(steps))

    workers = pl.read_parquet(f"{path}/workers/*.parquet").to_dicts()
    assert len(steps) <= len(workers) / NUM_WORKERS <= len(steps) + 1
    assert workers == expected_workers(len(workers) // NUM_WORKERS)

    assert sorted(read_steps_with_duckdb(path)) == list(range(len(steps)))
    assert sorted(read_steps_with_pandas(path)) == list(range(len(steps)))

    run = Run.open(path)
    assert run.status == "running"
    assert run.num_workers == NUM_WORKERS
    gathered = [report.gathered for report in run.iter_reports()]
    assert flushed <= len(gathered) <= len(steps)
    for number, step in enumerate(gathered):
        assert step.step == number
        assert [len(samples) for samples in step.samples] == [3, 0, 3, 3]
        assert [losses.tolist() for losses in step.micro_losses] == [
            [number + rank / 8, number + 1 + rank / 8] for rank in range(NUM_WORKERS)
        ]
    (finding,) = run.findings()
    assert finding.last_step >= flushed - 1

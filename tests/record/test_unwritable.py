import contextlib
import json
import os
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankscope import files
from rankscope.bus.evidence import Table
from rankscope.errors import RunError
from rankscope.files import RunTakenError
from rankscope.record import Run, RunWriter, begin
from rankscope.record.states import START_FILE, read_state
from record.run_files import ROWS_OF, files_of, make_finding, polars_rows, read_info, write
from record.step_reports import expected_steps, expected_workers, make_report
from report.recorded_runs import record_run
from support.limited import forked


@contextlib.contextmanager
def full_disk(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Directories that cannot be used -------------------------------------------------------------


def test_a_directory_with_something_in_it_is_refused_and_untouched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="not empty: choose another or remove it"):
        RunWriter(tmp_path, {})
    assert files_of(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("start", [None, {"step": 6}])
def test_what_a_start_that_was_killed_has_left_is_in_nobodys_way(tmp_path, start):
    for name in (".run.tmp", ".run.7-0123abcd.tmp", START_FILE):
        (tmp_path / name).write_text("half of")
    RunWriter(tmp_path, {}, start=start)
    seen = [name for name in files_of(tmp_path) if not name.startswith(".")]
    assert seen == ([START_FILE] if start else []) + ["run.json"]
    assert not start or read_state(tmp_path / START_FILE) == start


# Jobs that begin at once --------------------------------------------------------------------------


def overtake(monkeypatch, path):
    """Let another job begin its run when the next one has found the directory free."""
    create = begin.create_directory

    def overtaken(*arguments, **named):
        create(*arguments, **named)
        monkeypatch.setattr(begin, "create_directory", create)
        RunWriter(path, {"job": "other"})

    monkeypatch.setattr(begin, "create_directory", overtaken)


@pytest.mark.parametrize("links", [True, False])
def test_of_two_jobs_that_begin_at_once_one_has_the_directory(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr("os.link", mock.Mock(side_effect=PermissionError(1, "not supported")))
    overtake(monkeypatch, tmp_path)
    for _ in range(2):  # overtaken, and late
        with pytest.raises(RunTakenError, match="not empty: choose another or remove it"):
            RunWriter(tmp_path, {"job": "this"}, start={"step": 6})
    assert files_of(tmp_path) == ["run.json"]
    assert read_info(tmp_path)["job"] == "other"


# A full disk ----------------------------------------------------------------------------------


def test_a_full_disk_damages_nothing_and_a_later_flush_writes_all(tmp_path):
    run = write(tmp_path / "run", map(make_report, range(2)))
    for step in range(2, 60):
        run.add(make_report(step))
    with full_disk(1_000), pytest.raises(RunError, match="before is intact"):
        run.flush()
    for rows_of in ROWS_OF:
        assert rows_of(run.path, "steps") == expected_steps(2)
    assert not [file for file in files_of(run.path) if Path(file).name.startswith(".")]
    run.add(make_report(60))
    run.close()
    assert polars_rows(run.path, "steps") == expected_steps(61)
    assert polars_rows(run.path, "workers") == expected_workers(61)


def test_a_disk_that_fills_at_the_end_leaves_the_run_open(tmp_path):
    run = write(tmp_path / "run", [make_report(0)])
    with full_disk(10), pytest.raises(RunError, match=r"cannot write .*run\.json"):
        run.close()
    assert read_info(run.path)["status"] == "running"
    run.close()
    assert read_info(run.path)["status"] == "complete"
    run = RunWriter(tmp_path / "long", {"numbers": list(range(500))})
    with full_disk(3_000):  # no room for another file
        run.end_early(why="full")
    assert (read_info(run.path)["status"], read_info(run.path)["why"]) == ("incomplete", "full")


def test_a_finding_that_does_not_fit_leaves_no_half_line(tmp_path):
    run = RunWriter(tmp_path / "run", {})
    run.add_findings([make_finding("a")])
    size = (run.path / "findings.jsonl").stat().st_size
    with full_disk(size + 50), pytest.raises(RunError, match=r"cannot write .*findings\.jsonl"):
        run.add_findings([make_finding("b")])
    run.add_findings([make_finding("c")])
    with (run.path / "findings.jsonl").open("ab") as file:  # as if it could not be cut back
        file.write(b'{"id": "d", "ca')
    run.add_findings([make_finding("e")])
    lines = (run.path / "findings.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["a", "c", "e"]


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


def test_what_stood_behind_the_bytes_that_remain_is_replaced(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(files, "_PIECE", 4)
    path = tmp_path / "part"
    files.replace(path, b"rows footer")
    files.replace(path, b"more rows footer", after=5)
    assert path.read_bytes() == b"rows more rows footer"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_to_which_others_can_write_is_not_read(tmp_path: Path):
    path = tmp_path / "kept"
    assert files.read_own(path) is None
    path.write_bytes(b"mine")
    path.chmod(0o644)
    assert files.read_own(path) == b"mine"
    path.chmod(0o646)
    assert files.read_own(path) is None
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    assert files.read_own(tmp_path / "link") is None


@pytest.mark.parametrize("size", [0, 1000, 3 * 2**20 + 1])
def test_a_read_takes_no_more_memory_than_the_file_is_long(tmp_path: Path, size: int):
    """Not as much as it may be long at most, which a limited address space does not have."""
    content = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    (tmp_path / "file").write_bytes(content)
    tracemalloc.start()
    try:
        assert files.read_file(tmp_path / "file") == content
        assert tracemalloc.get_traced_memory()[1] < 4 * size + 2**22
    finally:
        tracemalloc.stop()

import contextlib
import json
import resource
from pathlib import Path

import pytest

from rankscope.errors import RunError
from rankscope.record import RunWriter
from record.run_files import duckdb_rows, make_finding, pandas_rows, polars_rows, read_info, write
from record.step_reports import expected_steps, expected_workers, files_of, make_report


@contextlib.contextmanager
def full_disk(num_bytes):
    """Let no file grow beyond ``num_bytes``: a write fails half-way, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Directories that cannot be used -------------------------------------------------------------


def test_an_empty_directory_is_used(tmp_path):
    RunWriter(tmp_path, {})
    assert files_of(tmp_path) == ["run.json"]


def test_a_directory_with_something_in_it_is_refused_and_untouched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="not empty: choose another or remove it"):
        RunWriter(tmp_path, {})
    assert files_of(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("below", ["file", "file/run"])
def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match=r"cannot create the run directory .*choose another path"):
        RunWriter(tmp_path / below, {})


def test_a_directory_that_takes_no_file_is_refused(tmp_path):
    with full_disk(0), pytest.raises(RunError, match="cannot write"):
        RunWriter(tmp_path / "run", {})


# A full disk ----------------------------------------------------------------------------------


def test_a_full_disk_damages_nothing_and_a_later_flush_writes_all(tmp_path):
    run = write(tmp_path / "run", map(make_report, range(2)))
    for step in range(2, 60):
        run.add(make_report(step))
    with full_disk(1_000), pytest.raises(RunError, match="before is intact"):
        run.flush()
    for rows_of in (duckdb_rows, pandas_rows, polars_rows):
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


def test_a_finding_that_does_not_fit_leaves_no_half_line(tmp_path):
    run = RunWriter(tmp_path / "run", {})
    run.add_findings([make_finding("a")])
    size = (run.path / "findings.jsonl").stat().st_size
    with full_disk(size + 50), pytest.raises(RunError, match=r"cannot write .*findings\.jsonl"):
        run.add_findings([make_finding("b")])
    run.add_findings([make_finding("c")])
    lines = (run.path / "findings.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["a", "c"]

import contextlib
import json
import resource
from pathlib import Path
from unittest import mock

import pytest

from rankscope.errors import RunError
from rankscope.files import RunTakenError
from rankscope.record import Run, RunWriter, begin
from rankscope.record.states import START_FILE, read_state
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


def test_a_line_that_could_not_be_cut_back_is_gone_before_the_next(tmp_path):
    run = RunWriter(tmp_path / "run", {})
    run.add_findings([make_finding("a")])
    with (run.path / "findings.jsonl").open("ab") as file:
        file.write(b'{"id": "b", "ca')
    run.add_findings([make_finding("c")])
    assert [finding.id for finding in Run.open(run.path).findings()] == ["a", "c"]

import json
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest

from rankscope.bus.evidence import Table
from rankscope.bus.step import MISSING_INT
from rankscope.errors import RunError
from rankscope.record import Run, RunWriter
from record.run_files import make_finding, record
from record.step_reports import expected_steps, expected_workers, make_report

W = 4


# Opening ---------------------------------------------------------------------------------------


def test_a_missing_directory(tmp_path):
    with pytest.raises(RunError, match=r"there is no run directory .*nowhere: check the path"):
        Run.open(tmp_path / "nowhere")


def test_a_file_in_place_of_a_directory(tmp_path):
    (tmp_path / "train.py").touch()
    with pytest.raises(RunError, match=r"train\.py is a file: name the directory of a run"):
        Run.open(tmp_path / "train.py")


@pytest.mark.parametrize("text", ["{", "\xff\xfe"])
def test_a_malformed_run_json(tmp_path, text):
    (tmp_path / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(RunError, match="cannot be read as JSON"):
        Run.open(tmp_path)


def test_a_newer_schema(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"schema_version": 2}))
    with pytest.raises(RunError, match=r"newer rankscope \(schema 2.*up to 1\): upgrade") as raised:
        Run.open(tmp_path)
    assert "\n" not in str(raised.value)


# Tables ----------------------------------------------------------------------------------------


def test_rows_are_sorted_whatever_their_order_in_the_files(tmp_path):
    run = record(tmp_path / "run", map(make_report, range(6)))
    file = run.path / "workers" / "part-000000.parquet"
    rows = pq.read_table(file)
    shuffled = rows.take(np.random.default_rng(0).permutation(len(rows)))
    pq.write_table(shuffled.slice(10), file)
    pq.write_table(shuffled.slice(0, 10), file.with_name("part-000001.parquet"))
    assert run.table(Table.WORKERS).to_pylist() == expected_workers(6)


def test_columns_that_older_files_lack_are_null(tmp_path):
    run = record(tmp_path / "run", map(make_report, range(3)))
    file = run.path / "workers" / "part-000000.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["lr", "optimizer_steps"]), file)
    columns = run.columns(Table.WORKERS, "lr", "optimizer_steps", "rank")
    assert np.isnan(columns["lr"]).all()
    assert (columns["optimizer_steps"] == MISSING_INT).all()
    assert columns["rank"].tolist() == [0, 1, 2, 3] * 3


def test_columns_that_this_version_does_not_know_are_left_out(tmp_path):
    run = record(tmp_path / "run", [make_report(0)])
    file = run.path / "steps" / "part-000000.parquet"
    rows = pq.read_table(file)
    pq.write_table(rows.append_column("of_tomorrow", [[1.0]]), file)
    assert run.table(Table.STEPS).to_pylist() == expected_steps(1)


def test_a_damaged_part_is_named(tmp_path):
    run = record(tmp_path / "run", [make_report(0)])
    file = run.path / "steps" / "part-000000.parquet"
    file.write_bytes(file.read_bytes()[:-10])
    for read in (lambda: run.table(Table.STEPS), lambda: run.latest(Table.STEPS)):
        with pytest.raises(
            RunError, match=r"cannot read .*steps/part-000000\.parquet: it is damaged"
        ):
            read()


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    run = record(tmp_path / "run", map(make_report, range(3)))
    readings = {
        "run.json": lambda: Run.open(run.path),
        "steps/part-000000.parquet": lambda: run.table(Table.STEPS),
        "workers/part-000000.parquet": lambda: run.is_long,
        "pairs/part-000000.parquet": lambda: run.cosines(max_frames=2),
        "samples/part-000000.parquet": lambda: run.latest(Table.SAMPLES),
    }
    denied = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr("io.open", denied)
    for name, read in readings.items():
        with pytest.raises(
            RunError, match=rf"{name} \(Permission denied\): check the path and its"
        ):
            read()


# Findings --------------------------------------------------------------------------------------


def test_the_last_event_of_a_finding_wins(tmp_path):
    writer = RunWriter(tmp_path / "run", {})
    writer.add_findings([make_finding("a"), make_finding("b")])
    closed = make_finding("a", last_step=12, status="closed", groups=("head",))
    writer.add_findings([closed])
    assert Run.open(writer.path).findings() == (closed, make_finding("b"))


def test_a_torn_last_line_is_ignored_wherever_it_is_torn(tmp_path):
    run = record(tmp_path / "run", [])
    lines = [json.dumps(make_finding(name).to_json()).encode() for name in "ab"]
    whole = b"\n".join(lines)
    for end in range(len(lines[0]) + 1, len(whole)):
        (run.path / "findings.jsonl").write_bytes(whole[:end])
        assert [finding.id for finding in run.findings()] == ["a"]
    for text in (whole, whole + b"\n"):
        (run.path / "findings.jsonl").write_bytes(text)
        assert [finding.id for finding in run.findings()] == ["a", "b"]


DEEP = f'{{"id": "a", "evidence": {"[" * 900}{"]" * 900}}}'


@pytest.mark.parametrize("line", ["{", '{"id": "a"}', "\xe9", DEEP])
def test_a_malformed_line_before_the_last_is_named(tmp_path, line):
    run = record(tmp_path / "run", [])
    good = json.dumps(make_finding("a").to_json())
    text = f"{good}\n{line}\n{good}\n"
    (run.path / "findings.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(RunError, match=r"findings\.jsonl, line 2 is not a finding"):
        run.findings()

import json
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest

from rankscope.bus.evidence import Table
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.step import MISSING_INT
from rankscope.errors import RunError, UsageError
from rankscope.record import Run, RunWriter, arrow_schema
from record.step_reports import (
    expected_steps,
    expected_workers,
    make_cosines,
    make_report,
)

W = 4


def record(path, reports, info=None):
    writer = RunWriter(path, {"num_workers": W} if info is None else info)
    for report in reports:
        writer.add(report)
    writer.close()
    return Run.open(path)


def make_finding(identity, step, **changes):
    values = {
        "id": identity,
        "cause": "data.overlapping_shards",
        "severity": Severity.NOTE,
        "ranks": (1,),
        "first_step": 0,
        "last_step": step,
        "explanation": "Some samples came twice.",
        "next_check": "Look at the sampler.",
        "evidence": {"repeats": 3},
        "step": step,
    }
    return Finding(**(values | changes))


# Opening ---------------------------------------------------------------------------------------


def test_an_opened_run_knows_itself(tmp_path):
    run = record(tmp_path / "run", [make_report(0)], {"num_workers": W, "model": "tiny"})
    assert run.path == tmp_path / "run"
    assert run.info["model"] == "tiny"
    assert run.num_workers == W
    assert run.status == "complete"


def test_a_run_is_told_by_its_run_json(tmp_path):
    assert not Run.is_run(tmp_path)
    assert not Run.is_run(tmp_path / "nowhere")
    record(tmp_path / "run", [])
    assert Run.is_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("info", "num_workers"),
    [({"world_size": 6}, 6), ({"num_workers": 3, "world_size": 6}, 3), ({}, W)],
)
def test_the_number_of_workers_is_stated_or_counted(tmp_path, info, num_workers):
    assert record(tmp_path / "run", [make_report(0)], info).num_workers == num_workers


def test_a_missing_directory(tmp_path):
    with pytest.raises(RunError, match=r"there is no run directory .*nowhere: check the path"):
        Run.open(tmp_path / "nowhere")


def test_a_file_in_place_of_a_directory(tmp_path):
    (tmp_path / "train.py").touch()
    with pytest.raises(RunError, match=r"train\.py is a file: name the directory of a run"):
        Run.open(tmp_path / "train.py")


def test_a_directory_that_is_no_run(tmp_path):
    with pytest.raises(RunError, match=r"it has no run\.json"):
        Run.open(tmp_path)


def test_a_path_that_the_system_refuses_is_no_run(tmp_path):
    path = tmp_path / ("n" * 300)  # Path.is_file raises for it
    assert not Run.is_run(path)
    with pytest.raises(RunError, match=r"run\.json \(File name too long\): check the path and its"):
        Run.open(path)


def test_a_table_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    run = record(tmp_path / "run", [make_report(0)])
    denied = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr("os.scandir", denied)
    with pytest.raises(
        RunError, match=r"cannot read .*/steps \(Permission denied\): check the path"
    ):
        run.table(Table.STEPS)


@pytest.mark.parametrize("text", ["", "{", '{"schema_version":', "\xff\xfe"])
def test_a_malformed_run_json(tmp_path, text):
    (tmp_path / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(RunError, match="cannot be read as JSON"):
        Run.open(tmp_path)


@pytest.mark.parametrize("info", [[], 3, {}, {"schema_version": "1"}])
def test_a_run_json_without_schema_version(tmp_path, info):
    (tmp_path / "run.json").write_text(json.dumps(info))
    with pytest.raises(RunError, match="states no schema_version"):
        Run.open(tmp_path)


def test_a_newer_schema(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"schema_version": 2}))
    with pytest.raises(RunError, match=r"newer rankscope \(schema 2.*up to 1\): upgrade") as raised:
        Run.open(tmp_path)
    assert "\n" not in str(raised.value)


# Tables ----------------------------------------------------------------------------------------


def test_tables_come_back_as_recorded(tmp_path):
    run = record(tmp_path / "run", map(make_report, range(9)))
    assert run.table(Table.STEPS).to_pylist() == expected_steps(9)
    assert run.table(Table.WORKERS).to_pylist() == expected_workers(9)


@pytest.mark.parametrize("table", list(Table))
def test_a_table_without_files_is_empty_with_its_schema(tmp_path, table):
    run = record(tmp_path / "run", [])
    assert run.table(table).num_rows == 0
    assert run.table(table).schema == arrow_schema(table)
    assert all(len(values) == 0 for values in run.columns(table).values())


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


def test_an_unknown_column(tmp_path):
    run = record(tmp_path / "run", [])
    with pytest.raises(UsageError, match="of steps, got 'los_mean'; it has step, time"):
        run.columns(Table.STEPS, "los_mean")
    with pytest.raises(UsageError, match=r"step_seconds is a column of workers"):
        run.columns(Table.STEPS, "step_seconds")
    with pytest.raises(UsageError, match="expected columns of workers, got 'los'"):
        run.per_worker("los")


def test_tables_go_by_their_names_too(tmp_path):
    run = record(tmp_path / "run", [make_report(0), make_report(1)])
    assert run.table("workers").equals(run.table(Table.WORKERS))
    np.testing.assert_array_equal(run.columns("steps", "step")["step"], [0, 1])
    for ask in (run.table, run.columns, run.latest):
        with pytest.raises(UsageError, match=r"one of the tables steps, workers.*got 'losses'"):
            ask("losses")


def test_columns_of_lists_are_arrays_of_arrays(tmp_path):
    run = record(tmp_path / "run", map(make_report, range(2)))
    columns = run.columns(Table.SAMPLES)
    assert columns["rank"].tolist() == [0, 2, 3, 0, 2, 3]
    assert columns["samples"].dtype == object
    assert [cell.tolist() for cell in columns["samples"]] == [
        [0, 1, 2],
        [2, 3, 4],
        [3, 4, 5],
        [10, 11, 12],
        [12, 13, 14],
        [13, 14, 15],
    ]


# Matrices --------------------------------------------------------------------------------------


def test_a_column_as_steps_by_workers(tmp_path):
    run = record(tmp_path / "run", map(make_report, (1, 3, 6)))
    steps, losses = run.per_worker("loss")
    assert steps.tolist() == [1, 3, 6]
    rows = {(row["step"], row["rank"]): row["loss"] for row in expected_workers(8)}
    expected = [[rows[step, rank] for rank in range(W)] for step in (1, 3, 6)]
    assert any(value is None for row in expected for value in row)
    np.testing.assert_array_equal(losses, np.array(expected, float))


def test_a_worker_without_rows_leaves_a_hole(tmp_path):
    run = record(tmp_path / "run", [make_report(1, 2), make_report(2, W)])
    _, ranks = run.per_worker("rank")
    np.testing.assert_array_equal(ranks, [[0, 1, np.nan, np.nan], [0, 1, 2, 3]])


def test_flags_and_large_integers_as_steps_by_workers(tmp_path):
    report = make_report(1)
    report.gathered.workers["batch_digest"][:] = [2**62 + 1, MISSING_INT, -3, 0]
    report.gathered.workers["nonfinite"][:] = [True, False, False, True]
    run = record(tmp_path / "run", [report])
    np.testing.assert_array_equal(run.per_worker("batch_digest")[1], [[2.0**62, np.nan, -3, 0]])
    np.testing.assert_array_equal(run.per_worker("nonfinite")[1], [[1.0, 0.0, 0.0, 1.0]])
    assert run.columns(Table.WORKERS, "batch_digest")["batch_digest"][0] == 2**62 + 1


def test_a_run_without_steps_has_empty_matrices(tmp_path):
    run = record(tmp_path / "run", [])
    steps, losses = run.per_worker("loss")
    assert (steps.shape, losses.shape) == ((0,), (0, W))
    steps, cosines = run.cosines()
    assert (steps.shape, cosines.shape) == ((0,), (0, W, W))


def test_cosines_come_back_as_matrices(tmp_path):
    reports = [make_report(step, observed=step != 3) for step in range(4, 0, -1)]
    run = record(tmp_path / "run", [*reversed(reports), make_report(5)], {"num_workers": 99})
    steps, cosines = run.cosines()
    assert steps.tolist() == [1, 2, 4, 5]
    expected = np.array([make_cosines(step, W) for step in (1, 2, 4, 5)], np.float32)
    np.testing.assert_array_equal(cosines, expected)


# Findings --------------------------------------------------------------------------------------


def test_the_last_event_of_a_finding_wins(tmp_path):
    writer = RunWriter(tmp_path / "run", {})
    writer.add_findings([make_finding("a", 1), make_finding("b", 1)])
    closed = make_finding("a", 7, severity=Severity.ERROR, status="closed", groups=("head",))
    writer.add_findings([closed])
    assert Run.open(writer.path).findings() == (closed, make_finding("b", 1))


def test_a_run_without_findings(tmp_path):
    assert record(tmp_path / "run", []).findings() == ()


def test_a_torn_last_line_is_ignored_wherever_it_is_torn(tmp_path):
    run = record(tmp_path / "run", [])
    lines = [json.dumps(make_finding(name, 1).to_json()).encode() for name in "ab"]
    whole = b"\n".join(lines)
    for end in range(len(lines[0]) + 1, len(whole)):
        (run.path / "findings.jsonl").write_bytes(whole[:end])
        assert [finding.id for finding in run.findings()] == ["a"]
    for text in (whole, whole + b"\n"):
        (run.path / "findings.jsonl").write_bytes(text)
        assert [finding.id for finding in run.findings()] == ["a", "b"]


@pytest.mark.parametrize("line", ["", "{", "[]", "7", '{"id": "a"}', "\xe9"])
def test_a_malformed_line_before_the_last_is_named(tmp_path, line):
    run = record(tmp_path / "run", [])
    good = json.dumps(make_finding("a", 1).to_json())
    text = f"{good}\n{line}\n{good}\n"
    (run.path / "findings.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(RunError, match=r"findings\.jsonl, line 2 is not a finding"):
        run.findings()


def test_an_unknown_severity_is_malformed(tmp_path):
    run = record(tmp_path / "run", [])
    event = make_finding("a", 1).to_json() | {"severity": "fatal"}
    (run.path / "findings.jsonl").write_text(json.dumps(event) + "\n\n")
    with pytest.raises(RunError, match="line 1"):
        run.findings()

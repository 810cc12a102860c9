import json
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.evidence import Table
from rankscope.bus.step import GatheredStep, as_recorded
from rankscope.errors import RunError
from rankscope.record import Run, RunWriter
from rankscope.stats.arrays import MISSING_INT
from record import step_reports
from record.run_files import make_finding, record
from record.step_reports import expected_steps, expected_workers, make_report
from support.same import assert_same

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
    pq.write_table(pq.read_table(file).append_column("of_tomorrow", [[1.0]]), file)
    assert run.table(Table.STEPS).to_pylist() == expected_steps(1)


def test_a_damaged_part_is_named(tmp_path):
    run = record(tmp_path / "run", [make_report(0)])
    file = run.path / "steps" / "part-000000.parquet"
    file.write_bytes(file.read_bytes()[:-10])
    for read in (lambda: run.table(Table.STEPS), lambda: run.latest(Table.STEPS)):
        with pytest.raises(RunError, match=r"cannot read .*part-000000\.parquet: it is damaged"):
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
    monkeypatch.setattr("io.open", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    for name, read in readings.items():
        with pytest.raises(RunError, match=rf"{name} \(Permission denied\): check the path"):
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
    (run.path / "findings.jsonl").write_bytes(f"{good}\n{line}\n{good}\n".encode("latin-1"))
    with pytest.raises(RunError, match=r"findings\.jsonl, line 2 is not a finding"):
        run.findings()


NAMES = ("embedding", "layers.0", "layers.1", "head")


def live_step(step, width):
    rng = np.random.default_rng([step, width])
    workers = {**step_reports.local_values(step, width), "num_samples": rng.integers(0, 9, width)}
    workers["grad_norm"][0] = np.inf if step % 5 else np.nan
    observed = step % 3 < 2
    lengths = [[0] * width, [1] * width, [2] * width, rng.integers(0, 5, width)][step % 4]
    sketches = rng.normal(size=(width, 31)).astype(np.float32) + 0.5
    if step % 7 == 0:
        sketches[0] = 0.0
    if step % 5 == 0:
        sketches[-1, 3] = np.nan
    narrow = rng.normal(size=(width, len(NAMES), 11)).astype(np.float32)
    narrow[:, : step % 2] = np.nan
    residuals = rng.random((width, len(NAMES)))  # what an audit finds: in some steps, parts of it
    residuals[rng.random(residuals.shape) < (1.0 if step % 5 == 1 else 0.3)] = np.nan
    return GatheredStep(
        step=step,
        time=1.7e9 + 0.1 * step,
        observed=observed,
        workers=workers,
        sketches_WK=sketches if observed else None,
        samples=tuple(rng.integers(-(2**63), 2**63, rng.integers(0, 4)) for _ in range(width))
        if step % 6
        else tuple(np.empty(0, np.int64) for _ in range(width)),
        micro_losses=tuple(rng.normal(size=n) for n in lengths),
        micro_weights=tuple(rng.normal(size=n) for n in lengths),
        micro_norms=tuple(
            np.where(rng.random(n) < 0.5, np.nan, 1.0) * (1 if observed else np.nan)
            for n in lengths
        ),
        micro_scales=tuple(np.full(n, np.nan) if step % 9 == 2 else rng.random(n) for n in lengths),
        differences=step_reports.make_differences(step, width) if step % 2 else (),
        groups=NAMES if observed else (),
        group_norms_WG=rng.random((width, len(NAMES))) if observed else None,
        group_sketches_WGK=narrow if observed and step % 4 else None,
        residuals_WG=residuals if observed and step % 5 else None,
        total_residuals_W=rng.random(width) if observed else None,
        interval=1 + step % 2,
    )


@pytest.mark.parametrize("width", [1, 8])
def test_reports_come_back_as_detectors_saw_them(tmp_path, width):
    live = [summarize(live_step(step, width)) for step in range(40)]
    run = record(tmp_path / "run", live, flush_every=7)
    for read, report in zip(run.iter_reports(), live, strict=True):
        assert_same(read, as_recorded(report))
        assert_same(as_recorded(read), read)


def test_from_a_later_step_on_earlier_rows_are_not_even_read(tmp_path, monkeypatch):
    monkeypatch.setattr("rankscope.record.writer.PART_BYTES", 1_000)
    live = [summarize(live_step(step, 3)) for step in (0, 1, 2, 5, 9, 10, 11)]
    run = record(tmp_path / "run", live, flush_every=1)
    for first, expected in [(0, 7), (3, 4), (5, 4), (6, 3), (11, 1), (12, 0)]:
        reports = list(run.iter_reports(first))
        assert len(reports) == expected
        for read, report in zip(reports, live[len(live) - expected :], strict=True):
            assert_same(read, as_recorded(report))
    for table in ("steps", "workers", "samples", "groups"):
        file = min((run.path / table).iterdir())
        data = bytearray(file.read_bytes())
        data[8:40] = bytes(32)  # the rows of the first part, not its footer
        file.write_bytes(data)
    assert [report.step for report in run.iter_reports(5)] == [5, 9, 10, 11]
    with pytest.raises(RunError, match="it is damaged"):
        list(run.iter_reports())


def test_steps_that_are_written_meanwhile_are_left_out(tmp_path):
    writer = RunWriter(tmp_path / "run", {})
    for step in range(4):
        writer.add(make_report(step))
        writer.flush()
    steps = []
    for report in Run.open(writer.path).iter_reports():
        steps.append(report.step)
        writer.add(make_report(10 + report.step))
        writer.flush()
    assert steps == [0, 1, 2, 3]


def test_a_step_without_workers_is_damage(tmp_path):
    run = record(tmp_path / "run", map(make_report, range(3)))
    file = run.path / "workers" / "part-000000.parquet"
    pq.write_table(pq.read_table(file).slice(0, 8), file)
    with pytest.raises(RunError, match=r"rows of step 2 are damaged \(it lacks the workers\)"):
        list(run.iter_reports())

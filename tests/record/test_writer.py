import json
import os
import threading
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pytest

from rankscope.bus.evidence import Table
from rankscope.errors import RunError
from rankscope.record import Run, RunWriter, writer
from rankscope.record.begin import begin_run, end_lost_run
from record.run_files import duckdb_rows, make_finding, pandas_rows, polars_rows, read_info, write
from record.step_reports import (
    expected_steps,
    expected_workers,
    files_of,
    make_cosines,
    make_report,
)

READERS = pytest.mark.parametrize("rows_of", [duckdb_rows, pandas_rows, polars_rows])


@READERS
def test_other_tools_read_every_value_after_every_flush(tmp_path, rows_of):
    run = RunWriter(tmp_path / "run", {})
    for step in range(5):
        run.add(make_report(step))
        run.flush()
        assert rows_of(run.path, "steps") == expected_steps(step + 1)
        assert rows_of(run.path, "workers") == expected_workers(step + 1)


@READERS
def test_other_tools_read_lists(tmp_path, rows_of):
    path = write(tmp_path / "run", map(make_report, range(2))).path
    samples = [(r["step"], r["rank"], list(r["samples"])) for r in rows_of(path, "samples")]
    assert samples[:4] == [
        (0, 0, [0, 1, 2]),
        (0, 2, [2, 3, 4]),
        (0, 3, [3, 4, 5]),
        (1, 0, [10, 11, 12]),
    ]
    undefined, defined = (list(row["cosines"]) for row in rows_of(path, "pairs"))
    assert sum(x is None or np.isnan(x) for x in undefined) == 3  # the last worker's pairs
    matrix = make_cosines(1, 4)
    pairs = [matrix[i, j] for i in range(4) for j in range(i + 1, 4)]
    assert defined == [float(np.float32(x)) for x in pairs]


def test_rows_wait_in_memory_until_a_flush(tmp_path):
    run = RunWriter(tmp_path / "run", {})
    run.add(make_report(0))
    assert files_of(run.path) == ["run.json"]
    run.flush()
    assert files_of(run.path) == [
        "pairs/part-000000.parquet",
        "run.json",
        "samples/part-000000.parquet",
        "steps/part-000000.parquet",
        "workers/part-000000.parquet",
    ]


def test_a_flush_without_new_rows_touches_no_file(tmp_path):
    run = write(tmp_path / "run", [make_report(0)])
    before = (run.path / "steps/part-000000.parquet").stat()
    run.flush()
    after = (run.path / "steps/part-000000.parquet").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_tables_without_rows_have_no_files(tmp_path):
    report = make_report(0, observed=False, samples=False)
    path = write(tmp_path / "run", [report]).path
    assert {Path(file).parent.name for file in files_of(path)} == {"", "steps", "workers"}


@pytest.mark.parametrize(
    ("num_workers", "recorded"), [(1, False), (2, True), (64, True), (65, False)]
)
def test_pairs_are_recorded_for_2_to_64_workers(tmp_path, num_workers, recorded):
    path = write(tmp_path / "run", [make_report(1, num_workers)]).path
    assert (path / "pairs").exists() == recorded
    if recorded:
        (row,) = polars_rows(path, "pairs")
        assert len(row["cosines"]) == num_workers * (num_workers - 1) // 2


def test_groups_are_recorded_by_name(tmp_path):
    path = write(tmp_path / "run", [make_report(2, 2, groups=True)]).path
    assert polars_rows(path, "groups") == [
        {
            "step": 2,
            "rank": rank,
            "group": name,
            "grad_norm": rank + norm,
            "cosine_rest": cosine,
            "reduction_residual": None,
            "accumulator_change": None,
        }
        for rank in range(2)
        for name, norm, cosine in [
            ("embedding", 10.0, 0.25),
            ("layers.0", 20.0, None),
            ("head", 30.0, 0.75),
        ]
    ]
    columns = Run.open(path).columns(Table.GROUPS)
    assert columns["group"].tolist() == ["embedding", "layers.0", "head"] * 2  # the model's order


def test_micro_batches_are_recorded_with_accumulation_only(tmp_path):
    path = write(tmp_path / "run", [make_report(0), make_report(1, 2, micro=3)]).path
    assert polars_rows(path, "micro") == [
        {
            "step": 1,
            "rank": rank,
            "micro": micro,
            "loss": micro + 1 + rank / 8,
            "loss_weight": micro + 100.0 * rank,
            "grad_norm": micro + 0.5 * rank,
            "loss_scale": 2.0**rank,
        }
        for rank in range(2)
        for micro in range(3)
    ]


def test_multipliers_that_nobody_knows_are_null(tmp_path):
    report = make_report(1, 2, micro=2)
    unknown = replace(report, gathered=replace(report.gathered, micro_scales=()))
    path = write(tmp_path / "run", [unknown]).path
    assert [row["loss_scale"] for row in polars_rows(path, "micro")] == [None] * 4


@READERS
def test_only_what_differs_between_workers_is_recorded_with_everybodys_digest(tmp_path, rows_of):
    path = write(tmp_path / "run", [make_report(3), make_report(4, 3, differences=True)]).path
    assert rows_of(path, "digests") == [
        {"step": 4, "rank": rank, "kind": kind, "name": name, "digest": digest, "unchanged": same}
        for rank in range(3)
        for kind, name, digest, same in [
            ("parameter", "head", -4 if rank == 1 else 4, False),
            ("reduced", "layers.0", 2**62 + rank, rank == 0),
        ]
    ]


def test_steps_that_are_added_together_leave_the_same_files(tmp_path):
    steps = [t for t in range(200) if t not in (63, 64, 130)]
    reports = [
        make_report(
            t, 3 + (t > 150), micro=1 + t % 3, observed=t % 4 > 0, groups=True, differences=t == 5
        )
        for t in steps
    ]
    alone, together = RunWriter(tmp_path / "alone", {}), RunWriter(tmp_path / "together", {})
    for report in reports:
        alone.add(report)
    for first, end in pairwise([0, 1, 3, 40, 41, 150, 150, len(reports)]):
        together.add_many(reports[first:end])
    alone.close()
    together.close()
    names = files_of(alone.path)
    assert names == files_of(together.path)
    for name in names:
        if name.endswith(".parquet"):
            one, other = (pl.read_parquet(run.path / name) for run in (alone, together))
            assert one.equals(other), name
    assert any(name.startswith("rollups/64") for name in names)


def test_arrays_may_be_reused_after_add(tmp_path):
    run = RunWriter(tmp_path / "run", {})
    report = make_report(0)
    run.add(report)
    for array in (*report.gathered.workers.values(), *report.gathered.samples):
        array[...] = 0
    run.flush()
    assert polars_rows(run.path, "workers") == expected_workers(1)
    assert polars_rows(run.path, "samples")[1]["samples"] == [2, 3, 4]


def test_parts_roll_over_and_finished_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "PART_BYTES", 2_000)
    run = RunWriter(tmp_path / "run", {})
    inodes: dict[str, set[int]] = {}
    for step in range(36):
        run.add(make_report(step))
        run.flush()
        *finished, _growing = sorted((run.path / "workers").iterdir())
        for file in finished:
            inodes.setdefault(file.name, set()).add(file.stat().st_ino)
        assert polars_rows(run.path, "workers") == expected_workers(step + 1)
    assert 5 < len(inodes) < 36
    assert all(len(seen) == 1 for seen in inodes.values())
    assert [*inodes] == [f"part-{part:06d}.parquet" for part in range(len(inodes))]
    assert polars_rows(run.path, "steps") == expected_steps(36)


def test_a_part_that_somebody_removes_is_gone_and_the_next_one_goes_on(tmp_path):
    run = write(tmp_path / "run", map(make_report, range(3)))
    (run.path / "workers" / "part-000000.parquet").unlink()
    for step in range(3, 5):
        run.add(make_report(step))
        run.flush()
    assert [f.name for f in (run.path / "workers").iterdir()] == ["part-000001.parquet"]
    assert polars_rows(run.path, "workers") == expected_workers(5)[12:]
    assert polars_rows(run.path, "steps") == expected_steps(5)


def test_a_part_that_was_cut_is_left_as_it_is(tmp_path):
    run = write(tmp_path / "run", map(make_report, range(3)))
    file = run.path / "workers" / "part-000000.parquet"
    file.write_bytes(file.read_bytes()[:100])
    run.add(make_report(3))
    with pytest.raises(RunError, match="shorter than it was"):
        run.flush()
    assert file.stat().st_size == 100
    assert [f for f in files_of(run.path) if f.endswith(".tmp")] == []


def test_a_run_between_flushes_grows_to_parts_of_16_megabytes(tmp_path):
    run = RunWriter(tmp_path / "run", {})
    report = make_report(0, 1024)
    for _ in range(300):
        run.add(report)
        run.flush_if_due(now=0.0)
    run.flush()
    run.add(report)
    run.flush()
    first, second = sorted((run.path / "workers").iterdir())
    assert pl.read_parquet(first).height == 300 * 1024
    assert pl.read_parquet(second).height == 1024


def test_steps_and_flushes_from_two_threads(tmp_path):
    run = RunWriter(tmp_path / "run", {})
    done = threading.Event()

    def keep_flushing():
        while not done.is_set():
            run.flush()

    thread = threading.Thread(target=keep_flushing)
    thread.start()
    for step in range(300):
        run.add(make_report(step, 2))
    done.set()
    thread.join()
    run.close()
    assert polars_rows(run.path, "workers") == expected_workers(300, 2)
    assert polars_rows(run.path, "steps") == expected_steps(300)


# run.json, and the end of a run ---------------------------------------------------------------


def test_run_json_says_what_the_run_is(tmp_path):
    info = {
        "model": Path("models/tiny"),
        "lr": np.float32(0.5),
        "ranks": np.arange(2),
        "limit": float("inf"),
        "versions": {"torch": "2.11"},
    }
    before = datetime.now(UTC).replace(microsecond=0)
    path = RunWriter(tmp_path / "deep" / "run", info).path
    written = read_info(path)
    assert written["schema_version"] == 1
    assert written["status"] == "running"
    assert before <= datetime.fromisoformat(written["started"]) <= datetime.now(UTC)
    assert {"torch", "rankscope", "numpy", "pyarrow", "python"} <= written["versions"].keys()
    assert written["model"] == "models/tiny"
    assert written["lr"] == 0.5
    assert written["ranks"] == [0, 1]
    assert written["limit"] is None
    assert "finished" not in written


def test_close_writes_what_is_left_and_the_status(tmp_path):
    run = RunWriter(tmp_path / "run", {})
    for step in range(3):
        run.add(make_report(step))
    run.close("interrupted")
    run.close("complete")
    written = read_info(run.path)
    assert written["status"] == "interrupted"
    assert written["steps"] == 3
    assert datetime.fromisoformat(written["finished"]) >= datetime.fromisoformat(written["started"])
    assert polars_rows(run.path, "steps") == expected_steps(3)
    with pytest.raises(RunError, match="closed"):
        run.add(make_report(3))


@pytest.mark.parametrize(("share", "folder", "file"), [("me", 0o700, 0o600), ("all", 0o755, 0o644)])
def test_a_run_is_as_readable_as_it_is_shared_whatever_the_umask(tmp_path, share, folder, file):
    umask = os.umask(0 if share == "me" else 0o077)
    try:
        info = begin_run(tmp_path / "run", {"num_workers": 2}, share=share)
        run = RunWriter(tmp_path / "run", info, begun=True)
        run.add(make_report(0))
        run.add_findings([make_finding("a")])
        run.close()
    finally:
        os.umask(umask)
    found = [run.path, *run.path.rglob("*")]
    kinds = {(path.is_dir(), path.stat().st_mode & 0o777) for path in found}
    assert kinds == {(True, folder), (False, file)}


def test_info_cannot_claim_another_schema_or_status(tmp_path):
    run = RunWriter(tmp_path / "run", {"schema_version": 99, "status": "complete"})
    assert read_info(run.path)["schema_version"] == 1
    assert read_info(run.path)["status"] == "running"


def test_a_flush_is_due_at_first_and_then_after_the_interval(tmp_path):
    run = RunWriter(tmp_path / "run", {}, flush_seconds=10.0)
    due = [run.flush_if_due(now) for now in (100.0, 109.9, 110.0, 119.0, 121.0, 5.0, 6.0)]
    assert due == [True, False, True, False, True, True, False]
    assert run.flush_if_due()


# Findings --------------------------------------------------------------------------------------


def test_findings_are_in_the_file_at_once_as_strict_json(tmp_path):
    run = RunWriter(tmp_path / "run", {})
    evidence = {"cosine": np.float64("nan"), "steps": np.array([1, 2]), "share": 0.5}
    run.add_findings([make_finding("a", evidence=evidence), make_finding("b")])
    run.add_findings([])
    run.add_findings([make_finding("a", status="closed")])

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    lines = (run.path / "findings.jsonl").read_text().splitlines()
    events = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [(e["id"], e["status"]) for e in events] == [
        ("a", "open"),
        ("b", "open"),
        ("a", "closed"),
    ]
    assert events[0]["evidence"] == {"cosine": None, "steps": [1, 2], "share": 0.5}
    assert events[1]["explanation"].endswith("– “equal”.")
    assert duckdb.sql(f"select count(*) from '{run.path}/findings.jsonl'").fetchall() == [(3,)]


def test_the_end_of_a_lost_run_takes_away_what_was_half_written(tmp_path: Path):
    path = tmp_path / "run"
    begin_run(path, {"num_workers": 2, "agent": {"pid": 7}})
    (path / "steps").mkdir()
    mine, others = path / "steps" / ".part-000000.7-ab.tmp", path / ".detectors.77-cd.tmp"
    mine.touch()
    others.touch()
    end_lost_run(path, 7, "by signal 9")
    info = read_info(path)
    assert (info["status"], info["agent"]["ended"]) == ("incomplete", "by signal 9")
    assert not mine.exists()
    assert others.exists(), "another process may be writing it"

import io
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pytest

from rankscope.bus.evidence import Table
from rankscope.bus.replicas import TRACE_WIDTH, StateKind, TensorTrace
from rankscope.record import Run, RunWriter, writer
from rankscope.record import states as files
from rankscope.record.begin import begin_run, end_lost_run
from rankscope.record.states import START_FILE, STATE_FILE, pack_state, read_state, unpack_state
from rankscope.stats.state import StateError
from record.run_files import ROWS_OF, files_of, make_finding, polars_rows, read_info, write
from record.step_reports import expected_steps, expected_workers, make_cosines, make_report


@pytest.mark.parametrize("rows_of", ROWS_OF)
def test_other_tools_read_every_value_after_every_flush(tmp_path, rows_of):
    run = RunWriter(tmp_path / "run", {})
    for step in range(5):
        run.add(make_report(step))
        run.flush()
        assert rows_of(run.path, "steps") == expected_steps(step + 1)
        assert rows_of(run.path, "workers") == expected_workers(step + 1)


def test_other_tools_read_lists(tmp_path):
    path = write(tmp_path / "run", map(make_report, range(2))).path
    rows = polars_rows(path, "samples")[:4]
    samples = [(row["step"], row["rank"], list(row["samples"])) for row in rows]
    assert samples[:3] == [(0, 0, [0, 1, 2]), (0, 2, [2, 3, 4]), (0, 3, [3, 4, 5])]
    assert samples[3] == (1, 0, [10, 11, 12])
    undefined, defined = (list(row["cosines"]) for row in polars_rows(path, "pairs"))
    assert sum(x is None or np.isnan(x) for x in undefined) == 3  # the last worker's pairs
    matrix = make_cosines(1, 4)
    pairs = [matrix[i, j] for i in range(4) for j in range(i + 1, 4)]
    assert defined == [float(np.float32(x)) for x in pairs]


def test_steps_that_are_added_together_leave_the_same_files(tmp_path):
    reports = [
        make_report(t, 4, micro=1 + t % 3, observed=t % 4 > 0, groups=True, differences=t == 5)
        for t in range(140)
        if t not in (63, 64, 130)
    ]
    alone, together = RunWriter(tmp_path / "alone", {}), RunWriter(tmp_path / "together", {})
    for report in reports:
        alone.add(report)
    for first, end in pairwise([0, 1, 3, 40, 100, 100, len(reports)]):
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


def test_parts_roll_over_and_finished_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "PART_BYTES", 2_000)
    run = RunWriter(tmp_path / "run", {})
    inodes: dict[str, set[int]] = {}
    for step in range(24):
        run.add(make_report(step))
        run.flush()
        *finished, _growing = sorted((run.path / "workers").iterdir())
        for file in finished:
            inodes.setdefault(file.name, set()).add(file.stat().st_ino)
        assert polars_rows(run.path, "workers") == expected_workers(step + 1)
    assert 3 < len(inodes) < 24
    assert all(len(seen) == 1 for seen in inodes.values())
    assert [*inodes] == [f"part-{part:06d}.parquet" for part in range(len(inodes))]
    assert polars_rows(run.path, "steps") == expected_steps(24)


def test_steps_and_flushes_from_two_threads(tmp_path):
    run = RunWriter(tmp_path / "run", {})
    done = threading.Event()

    def keep_flushing():
        while not done.is_set():
            run.flush()

    thread = threading.Thread(target=keep_flushing)
    thread.start()
    for step in range(100):
        run.add(make_report(step, 2))
    done.set()
    thread.join()
    run.close()
    assert polars_rows(run.path, "workers") == expected_workers(100, 2)
    assert polars_rows(run.path, "steps") == expected_steps(100)


def test_a_large_trace_is_written_before_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "PENDING_BYTES", 10 * 8 * TRACE_WIDTH)
    run = RunWriter(tmp_path / "run", {}, flush_seconds=100.0)
    run.add(make_report(0))
    assert run.flush_if_due(0.0)
    kinds, rows = (StateKind.PARAMETER,) * 4, np.ones((4, TRACE_WIDTH), np.float32)
    trace = TensorTrace(kinds, tuple("abcd"), np.arange(4), np.ones(4), rows)
    due = []
    for step in range(1, 7):
        report = make_report(step)
        run.add(replace(report, gathered=replace(report.gathered, trace=trace)))
        due.append(run.flush_if_due(float(step)))
    assert due == [False, False, True, False, False, True]
    run.close()
    assert len(Run.open(run.path).table(Table.TRACES)) == 24


def test_no_column_imports_pandas():
    """Its import takes most of a second, which the training would spend in waiting for the lock."""
    work = """
import sys, numpy as np
from rankscope.bus.evidence import DType
from rankscope.record.writer import GrowingPart
from rankscope.record.schema import pa, to_arrow, to_arrow_lists
cells = [np.array([1.0, np.nan]), np.array([])]
columns = {
    "float": to_arrow(np.array([1.0, np.nan]), DType.FLOAT),
    "int": to_arrow(np.array([1.0, np.nan]), DType.INT),
    "bool": to_arrow(np.array([True, False]), DType.BOOL),
    "text": to_arrow(np.array(["a", "b"], object), DType.TEXT),
    "floats": to_arrow_lists(cells, DType.FLOATS),
}
part, _ = GrowingPart().grown(pa.table(columns))
part.grown(pa.table(columns))
assert part.num_bytes and "pandas" not in sys.modules
from importlib.util import find_spec
assert find_spec("pandas"), "it is there"
"""
    subprocess.run([sys.executable, "-c", work], check=True)


# run.json, and the end of a run ---------------------------------------------------------------


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
    told = [f"{event['id']} {event['status']}" for event in events]
    assert told == ["a open", "b open", "a closed"]
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


STATE = {
    "numbers": [1, -2.5, float("-inf"), True, None, "text/with ünicode"],
    "array": np.array([[2.0**-1074, np.nan], [-0.0, np.inf]]),
    "nested": {"pairs": [[np.arange(3, dtype=np.int8), np.zeros((0, 2), bool)]], "": {}},
}


def test_a_state_comes_back():
    read = unpack_state(pack_state(STATE))
    assert read["numbers"] == STATE["numbers"]
    assert read["array"].tobytes() == STATE["array"].tobytes()
    keys, flags = read["nested"]["pairs"][0]
    assert (keys.dtype, keys.tolist()) == (np.int8, [0, 1, 2])
    assert (flags.dtype, flags.shape) == (bool, (0, 2))
    assert read["nested"][""] == {}


def archive(**members):
    file = io.BytesIO()
    np.savez(file, **members)
    return file.getvalue()


def test_a_damaged_or_foreign_file_is_no_state(tmp_path, monkeypatch):
    whole = pack_state(STATE)
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 0x40
    pickled = io.BytesIO()
    np.savez(pickled, tree=np.array([{"a": 1}], object))
    for content in (
        b"",
        b"no archive",
        whole[: len(whole) // 2],
        bytes(flipped),
        pickled.getvalue(),
        archive(),
        archive(tree=np.zeros(3)),
        archive(tree=np.frombuffer(b'{"format": 1}', np.uint8)),
    ):
        with pytest.raises(StateError, match="it is damaged"):
            unpack_state(content)
    with pytest.raises(StateError, match="it cannot be read"):
        read_state(tmp_path)
    assert read_state(tmp_path / "nothing") is None
    monkeypatch.setattr(files, "STATE_FORMAT", 2)
    with pytest.raises(StateError, match="another release"):
        unpack_state(whole)


def test_a_run_holds_the_state_it_began_with_and_the_last_one(tmp_path):
    writer = RunWriter(tmp_path / "run", {}, start={"step": 6})
    assert files_of(writer.path) == [START_FILE, "run.json"]
    for step in (7, 8):
        writer.save_state(lambda step=step: {"step": step})
    assert read_state(writer.path / STATE_FILE) == {"step": 8}
    writer.close()
    writer.save_state(lambda: {"step": 9}, at_end=True)  # too late
    assert read_state(writer.path / STATE_FILE) == {"step": 8}
    assert read_state(writer.path / START_FILE) == {"step": 6}

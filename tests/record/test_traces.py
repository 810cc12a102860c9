"""Rows of traces, and how long they wait in memory."""

import dataclasses

import numpy as np

from rankscope import Run
from rankscope.bus.evidence import Table
from rankscope.bus.replicas import TRACE_WIDTH, StateKind, TensorTrace
from rankscope.record import RunWriter, writer
from record.step_reports import make_report


def make_trace(step, *names, kind=StateKind.PARAMETER, norm=None, initial=None):
    count = len(names)
    return TensorTrace(
        (kind,) * count,
        names,
        np.arange(count) + 100 * step,
        np.full(count, step + 0.5 if norm is None else norm),
        np.full((count, TRACE_WIDTH), step / 3, np.float32),
        initial,
    )


def traced_report(step, trace):
    report = make_report(step)
    return dataclasses.replace(report, gathered=dataclasses.replace(report.gathered, trace=trace))


def test_a_step_has_a_row_for_each_tensor_and_the_first_one_tells_of_the_beginning(tmp_path):
    run = RunWriter(tmp_path / "run", {})
    run.add(traced_report(3, make_trace(3, "a", "b", initial=make_trace(2, "a", "b", "c"))))
    run.add(traced_report(4, None))
    run.add(traced_report(5, make_trace(5, "b", kind=StateKind.REDUCED)))
    run.close()
    rows = Run.open(run.path).table(Table.TRACES).to_pylist()
    assert [(r["step"], r["kind"], r["name"], r["digest"], r["norm"]) for r in rows] == [
        (2, "parameter", "a", 200, 2.5),
        (2, "parameter", "b", 201, 2.5),
        (2, "parameter", "c", 202, 2.5),
        (3, "parameter", "a", 300, 3.5),
        (3, "parameter", "b", 301, 3.5),
        (5, "reduced", "b", 500, 5.5),
    ]
    assert rows[4]["sketch"] == [1.0] * TRACE_WIDTH


def test_a_large_trace_is_written_before_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "PENDING_BYTES", 10 * 8 * TRACE_WIDTH)
    run = RunWriter(tmp_path / "run", {}, flush_seconds=100.0)
    run.add(make_report(0))
    assert run.flush_if_due(0.0)
    due = []
    for step in range(1, 7):
        run.add(traced_report(step, make_trace(step, "a", "b", "c", "d")))
        due.append(run.flush_if_due(float(step)))
    assert due == [False, False, True, False, False, True]
    run.close()
    assert len(Run.open(run.path).table(Table.TRACES)) == 24

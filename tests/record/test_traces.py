"""How long rows of traces wait in memory."""

import dataclasses

import numpy as np

from rankscope import Run
from rankscope.bus.evidence import Table
from rankscope.bus.replicas import TRACE_WIDTH, StateKind, TensorTrace
from rankscope.record import RunWriter, writer
from record.step_reports import make_report


def make_trace(step, *names):
    count = len(names)
    return TensorTrace(
        (StateKind.PARAMETER,) * count,
        names,
        np.arange(count) + 100 * step,
        np.full(count, step + 0.5),
        np.full((count, TRACE_WIDTH), step / 3, np.float32),
    )


def traced_report(step, trace):
    report = make_report(step)
    return dataclasses.replace(report, gathered=dataclasses.replace(report.gathered, trace=trace))


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

"""What sinks get of a step, against the record's rows and a naive count."""

import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from rankscope.bus.evidence import Table, Tail
from rankscope.bus.finding import Severity
from rankscope.bus.step import MISSING_INT
from rankscope.evidence import columns_of
from rankscope.record.rows import rows_of
from rankscope.sinks.base import MAX_NAMED, STEP_SIGNALS, WORKER_SIGNALS, step_values
from rankscope.sinks.hub import Sinks
from rankscope.sinks.specs import PlannedSink
from record.step_reports import make_report
from sinks.findings import FINDING, finding, run_info

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "trackers.md"

STEPS_WITH_UNDEFINED = (0, 1, 2, 4, 5, 6, 7)
"""Of these the reports made by hand leave some columns without a value."""


@pytest.mark.parametrize("step", [0, 3])
def test_numbers_are_those_of_the_record_and_what_is_undefined_is_left_out(step):
    report = make_report(step)
    values = step_values(report).values
    rows = rows_of([report])[Table.STEPS]
    defined = {name: float(row[0]) for name, row in rows.items() if np.isfinite(row[0])}
    del defined["step"], defined["time"]
    assert values == defined
    undefined = [name for name, row in rows.items() if not np.isfinite(row[0])]
    assert bool(undefined) is (step in STEPS_WITH_UNDEFINED)


@pytest.mark.parametrize("step", [0, 3])
def test_spreads_and_ranks_are_those_of_the_workers_that_have_a_value(step):
    report = make_report(step)
    for index, column in enumerate(report.gathered.workers.values()):  # one without, in each
        if column.dtype != bool:
            column[index % 4] = MISSING_INT if column.dtype.kind == "i" else np.nan
    values, rows = step_values(report), rows_of([report])[Table.WORKERS]
    shown = [s for s in columns_of(Table.WORKERS) if s.tail is not Tail.NONE]
    assert [s.name for s in shown] == [s.name for s in WORKER_SIGNALS]
    partly = 0
    for name in [s.name for s in shown]:
        cells = enumerate(rows[name].tolist())
        known = {r: float(c) for r, c in cells if np.isfinite(c) and c != MISSING_INT}
        assert values.by_rank(name) == known
        spread = values.spread(name)
        if not known:
            assert spread is None
            continue
        partly += len(known) == 3
        assert (spread.low, spread.high) == (min(known.values()), max(known.values()))
        assert math.isclose(spread.mean, sum(known.values()) / len(known), rel_tol=1e-12)
        assert values.flat()[f"rankscope_workers/{name}/max"] == spread.high
    assert partly > 5


class Seen:
    def __init__(self):
        self.steps = []

    def open(self, run):
        pass

    def step(self, step):
        self.steps.append(step)

    def finding(self, finding):
        pass

    def close(self):
        pass


def test_open_findings_are_counted_and_the_first_ranks_they_name_are_shown(tmp_path):
    seen = Seen()
    known = finding(id="old", severity=Severity.ERROR, ranks=(9,))
    info = run_info(tmp_path, findings=(known,))
    sinks = Sinks([PlannedSink("seen", lambda: seen)], info)
    everywhere = finding(id="all", severity=Severity.NOTE, ranks=tuple(range(40)))
    events = [
        [],
        [FINDING, everywhere],
        [finding(severity=Severity.ERROR)],
        [finding(id="old", status="closed")],
    ]
    for step, found in enumerate(events):
        sinks.step(make_report(step, 40), found)
    sinks.close(60)
    note, warning, error = Severity
    assert [Counter(step.open_findings) for step in seen.steps] == [
        Counter({error: 1}),
        Counter({error: 1, note: 1, warning: 1}),
        Counter({error: 2, note: 1}),
        Counter({error: 1, note: 1}),
    ]
    assert seen.steps[0].named == (9,)
    assert seen.steps[1].named[:4] == (9, 1, 3, 0)
    assert len(seen.steps[-1].named) == MAX_NAMED
    assert seen.steps[-1].flat()["rankscope/findings_warning"] == 0


def test_all_names_are_documented_and_no_other():
    rows = re.findall(r"^\| `(rankscope[^`]*)` \| (.*) \|$", PAGE.read_text(), re.M)
    columns = {name: re.findall(r"`(\w+)`", cell) for name, cell in rows}
    assert columns == {
        "rankscope/…": [s.name for s in STEP_SIGNALS],
        "rankscope/findings_…": [str(severity) for severity in Severity],
        "rankscope_workers/…": [s.name for s in WORKER_SIGNALS],
    }
    names = {name.replace("…", column) for name, cells in columns.items() for column in cells}
    shown = step_values(make_report(1)).flat()
    assert {re.sub(r"/(min|mean|max)$", "", name) for name in shown} <= names

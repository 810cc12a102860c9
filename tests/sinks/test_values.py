"""What sinks get of a step beside the columns, whose numbers ``test_live.py`` reads back."""

import re
from collections import Counter
from pathlib import Path

from rankscope.bus.finding import Severity
from rankscope.sinks.base import MAX_NAMED, STEP_SIGNALS, WORKER_SIGNALS, step_values
from rankscope.sinks.hub import Sinks
from rankscope.sinks.specs import PlannedSink
from record.step_reports import make_report
from sinks.findings import FINDING, finding, run_info
from sinks.test_feeder import Gated

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "trackers.md"


def test_open_findings_are_counted_and_the_first_ranks_they_name_are_shown(tmp_path):
    seen = Gated(open_gate=True)
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
    steps = [value for what, value in seen.got if what == "step"]
    note, warning, error = Severity
    assert [Counter(step.open_findings) for step in steps] == [
        Counter({error: 1}),
        Counter({error: 1, note: 1, warning: 1}),
        Counter({error: 2, note: 1}),
        Counter({error: 1, note: 1}),
    ]
    assert steps[0].named == (9,)
    assert steps[1].named[:4] == (9, 1, 3, 0)
    assert len(steps[-1].named) == MAX_NAMED
    assert steps[-1].flat()["rankscope/findings_warning"] == 0


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

import threading
from collections import Counter

import pytest

from rankscope.bus.finding import Severity
from rankscope.sinks import hub as hub_module
from rankscope.sinks.base import MAX_NAMED, step_values
from rankscope.sinks.hub import Feeder, Sinks
from rankscope.sinks.specs import PlannedSink
from record.step_reports import make_report
from sinks.findings import FINDING, finding, run_info

LONG = 60.0


class Gated:
    """A sink that does nothing until it is let, and keeps what it got."""

    def __init__(self, *, fails_at="", error=None, open_gate=False):
        self.got = []
        self.entered, self.gate = threading.Event(), threading.Event()
        self._fails_at, self._error = fails_at, error or ValueError("no disk")
        if open_gate:
            self.gate.set()

    def _do(self, what, value):
        if what == self._fails_at:
            raise self._error
        self.entered.set()
        self.gate.wait(LONG)
        self.got.append((what, value))

    def open(self, run):
        self._do("open", run.num_workers)

    def step(self, step):
        self._do("step", step)

    def finding(self, finding):
        self._do("finding", finding.id)

    def close(self):
        self.got.append(("close", None))


def hub(tmp_path, **sinks):
    planned = [PlannedSink(name, lambda sink=sink: sink) for name, sink in sinks.items()]
    return Sinks(planned, run_info(tmp_path))


def test_a_slow_sink_misses_the_oldest_steps_and_no_finding(tmp_path, told, monkeypatch):
    monkeypatch.setattr(hub_module, "MAX_STEPS", 8)
    sink = Gated()
    feeder = Feeder("slow", sink, run_info(tmp_path))
    assert sink.entered.wait(LONG)
    for step in range(20):
        feeder.step(step_values(make_report(step)))
        feeder.finding(finding(id=f"f{step}"))
    assert feeder.lost_steps == 12
    [message] = told()
    assert "sink slow is slow: 8 steps wait" in message
    assert "training is not delayed" in message
    sink.gate.set()
    feeder.finish()
    assert feeder.join(LONG)
    assert [value.step for what, value in sink.got if what == "step"] == list(range(12, 20))
    assert [value for what, value in sink.got if what == "finding"] == [f"f{i}" for i in range(20)]


@pytest.mark.parametrize("place", ["open", "step", "finding"])
def test_a_sink_that_fails_is_closed_and_said_once_and_others_go_on(tmp_path, told, place):
    bad, good = Gated(fails_at=place, error=SystemExit(3), open_gate=True), Gated(open_gate=True)
    sinks = hub(tmp_path, bad=bad, good=good)
    for step in range(5):
        sinks.step(make_report(step), [FINDING])
    sinks.close(LONG)
    [message] = told()
    assert message.startswith("sink bad has failed")
    assert "SystemExit: 3" in message
    assert bad.got[-1] == ("close", None)
    assert place not in [what for what, _ in bad.got]
    assert [value.step for what, value in good.got if what == "step"] == list(range(5))


def test_a_sink_that_hangs_is_left_behind_and_others_are_not(tmp_path, told):
    stuck, good = Gated(), Gated(open_gate=True)
    sinks = hub(tmp_path, stuck=stuck, good=good)
    assert stuck.entered.wait(LONG)
    for step in range(3):
        sinks.step(make_report(step), [])
    sinks.close(0.2)
    [line] = [message for message in told() if "stuck" in message]
    assert line.startswith("sink stuck did not end within 0.2 s and is left behind: 3 of its steps")
    assert stuck.got == []
    stuck.gate.set()
    [feeder] = [one for one in sinks._feeders if one.name == "stuck"]
    assert feeder.join(LONG)  # it goes on as long as the process does
    assert [what for what, _ in stuck.got] == ["open", "step", "step", "step", "close"]


def test_open_findings_are_counted_and_the_first_ranks_they_name_are_shown(tmp_path):
    seen = Gated(open_gate=True)
    info = run_info(tmp_path, findings=(finding(id="old", severity=Severity.ERROR, ranks=(9,)),))
    sinks = Sinks([PlannedSink("seen", lambda: seen)], info)
    events = [
        [],
        [FINDING, finding(id="all", severity=Severity.NOTE, ranks=tuple(range(40)))],
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

import re
from pathlib import Path

import pytest

from rankscope.bus.finding import Severity
from rankscope.errors import UsageError
from rankscope.sinks import plan_alerts, plan_sinks, specs
from rankscope.sinks.base import STEP_SIGNALS, WORKER_SIGNALS, step_values
from rankscope.sinks.command import CommandSink
from rankscope.sinks.jsonl import JsonLinesSink
from record.step_reports import make_report

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "trackers.md"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("tensorbord", "one of tensorboard"),
        ("prometheus:", "prometheus:PORT"),
        ("webhook:file:///secret", "http://"),
        ("webhook:https://example.org/secret?severity=bad", "severity=note, warning, error"),
        ("webhook:https://example.org/T0 /secret", "a blank .* as %20"),
        ("webhook:https://me:secret@example.org/T0", "name and password"),
        ("command", "command:COMMAND"),
        ("slack:ftp://example.org/secret", "slack:URL with http://"),
        ("mailto:secret", "addresses such as ops@example.org"),
        ("mailto:a@example.org,b", "commas between them"),
        ("mailto:a@example.org?smtp=me:secret@example.org", "login belongs into the environment"),
        ("mailto:a@example.org?smtp=example.org:99999", "a port up to 65535"),
        ("mailto:a@example.org?smtp=a%0Ab", "with a host"),
        ("mailto:a@example.org?server=secret", "with from=ADDRESS and severity=…, got server"),
        ("mailto:a@example.org?severity=bad", "sink mailto expected severity=note"),
        ([3], "open, step, finding and close"),
    ],
)
def test_what_cannot_work_is_said(spec, says):
    with pytest.raises(UsageError, match=says) as raised:
        plan_sinks(spec)
    assert "secret" not in str(raised.value)


def test_strings_and_objects_can_be_mixed_and_one_needs_no_list(tmp_path):
    own = JsonLinesSink(tmp_path / "own.jsonl")
    first, second, third = plan_sinks(["jsonl:a:b.jsonl", own, "command:notify --quiet: x"])
    assert [first.name, second.name, third.name] == ["jsonl", "JsonLinesSink", "command"]
    assert str(first.make()._path) == "a:b.jsonl"
    assert second.make() is own
    assert isinstance(third.make(), CommandSink)
    assert third.make()._command == "notify --quiet: x"
    assert plan_sinks(own)[0].make() is own
    assert len(plan_sinks("jsonl")) == 1
    assert plan_sinks(()) == ()


def test_the_severity_is_taken_off_the_url_and_the_url_is_not_in_the_name():
    [planned] = plan_sinks("webhook:https://hooks.example.org/T0/secret?a=1&severity=error")
    assert planned.name == "webhook to hooks.example.org"
    sink = planned.make()
    assert sink._url == "https://hooks.example.org/T0/secret?a=1"
    assert sink._severity is Severity.ERROR
    [planned] = plan_sinks("webhook:http://localhost:80/x?b=%20c")
    assert planned.make()._url == "http://localhost:80/x?b=%20c"


def test_mail_goes_where_the_address_and_its_query_say():
    spec = "mailto:a@example.org,b%2Bc@example.org?smtp=[::1]:2525&from=me@x.org&severity=error"
    sink = plan_sinks(spec)[0].make()
    assert sink._recipients == ("a@example.org", "b+c@example.org")
    assert (sink._host, sink._port, sink._sender) == ("::1", 2525, "me@x.org")
    assert sink._severity is Severity.ERROR
    sink = plan_sinks("mailto:a@example.org")[0].make()
    assert (sink._host, sink._port, sink._severity) == ("localhost", 25, Severity.NOTE)


def test_an_alert_survives_the_way_to_the_agent():
    places = ["slack:https://example.org/T0?severity=error", "mailto:a@example.org"]
    planned = plan_alerts(places)
    again = plan_sinks([one.spec for one in planned])
    for first, second in zip(planned, again, strict=True):
        assert (first.name, first.spec) == (second.name, second.spec)
        assert second.make()._alerts
    assert [one.make()._severity for one in again] == [Severity.ERROR, Severity.WARNING]
    assert [one.spec for one in plan_alerts(places[1])] == [planned[1].spec]
    assert plan_alerts(()) == plan_alerts([]) == ()


@pytest.mark.parametrize("alerts", ["tensorboard", "https://example.org/secret", [3], 3])
def test_what_can_be_no_alert_is_said_without_its_secret(alerts):
    with pytest.raises(UsageError, match="slack:URL") as raised:
        plan_alerts(alerts)
    assert "secret" not in str(raised.value)


def test_every_sink_has_a_form_and_a_line_in_the_documentation():
    forms = [re.match(r"[a-z]+", form)[0] for form in specs.FORMS]
    assert forms == list(specs._KINDS)
    assert specs._PACKAGES.keys() | specs._IN_TRAINING <= set(forms)
    page = PAGE.read_text()
    for form in specs.FORMS:
        without, whole = re.sub(r"\[.*?\]", "", form), re.sub(r"[\[\]]", "", form)
        names = ", ".join(f'`"{name}"`' for name in dict.fromkeys((without, whole)))
        assert f"| {names} |" in page


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

"""Sinks as users name them."""

import pytest

from rankscope.bus.finding import Severity
from rankscope.errors import UsageError
from rankscope.sinks import plan_sinks
from rankscope.sinks.command import CommandSink
from rankscope.sinks.jsonl import JsonLinesSink


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

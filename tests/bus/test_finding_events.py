"""What is news about a finding, and what is recorded of it."""

from dataclasses import replace

from rankscope.bus.finding import FindingEvent, FindingEvents, Severity
from sinks.findings import FINDING, finding

NOTE, WARNING, ERROR = Severity
OPENED, WORSE, CLOSED, CHANGED, GREW = FindingEvent


def events_of(events, *updates):
    return [events.of(finding(severity=s, status=status)) for s, status in updates]


def news(events, *updates):
    return [e if e and e.is_news else None for e in events_of(events, *updates)]


def test_a_finding_is_news_when_it_opens_gets_worse_or_closes():
    updates = [
        (NOTE, "open"),
        (NOTE, "open"),
        (WARNING, "open"),
        (NOTE, "open"),
        (WARNING, "open"),
        (ERROR, "open"),
        (ERROR, "closed"),
        (ERROR, "closed"),
        (NOTE, "open"),
    ]
    assert events_of(FindingEvents(), *updates) == [
        *(OPENED, None, WORSE, CHANGED, CHANGED),
        *(WORSE, CLOSED, None, OPENED),
    ]


def test_below_the_severity_nothing_is_news():
    updates = [
        (NOTE, "open"),
        (NOTE, "closed"),
        (NOTE, "open"),
        (WARNING, "open"),
        (NOTE, "closed"),
    ]
    found = news(FindingEvents(severity=WARNING), *updates)
    assert found == [None, None, None, OPENED, CLOSED]


def test_numbers_are_recorded_when_there_is_twice_as_much():
    events, counts = FindingEvents(), [1, 2, 3, 4, 7, 8, 8, 40]
    found = [events.of(replace(FINDING, last_step=count), count) for count in counts]
    assert found == [OPENED, GREW, None, GREW, None, GREW, None, GREW]
    [(last, count)] = events.reported
    assert (last.last_step, count) == (40, 40)
    assert events.of(replace(FINDING, last_step=41)) is None  # of unknown count

"""What is news about a finding."""

from rankscope.core.finding import Severity
from rankscope.sinks.base import Change, Changes, sentence
from sinks.findings import FINDING, finding

NOTE, WARNING, ERROR = Severity


def news(changes, *events):
    return [changes.of(finding(severity=s, status=status)) for s, status in events]


def test_a_finding_is_news_when_it_opens_gets_worse_or_closes():
    events = [
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
    assert news(Changes(), *events) == [
        *(Change.OPENED, None, Change.WORSE, None, None),
        *(Change.WORSE, Change.CLOSED, None, Change.OPENED),
    ]


def test_findings_that_are_known_are_no_news_until_they_change():
    assert news(Changes([FINDING]), (WARNING, "open"), (ERROR, "open")) == [None, Change.WORSE]
    assert news(Changes([FINDING]), (WARNING, "closed")) == [Change.CLOSED]
    assert news(Changes([finding(status="closed")]), (WARNING, "open")) == [Change.OPENED]


def test_below_the_severity_nothing_is_news():
    events = [(NOTE, "open"), (NOTE, "closed"), (NOTE, "open"), (WARNING, "open"), (NOTE, "closed")]
    found = news(Changes(severity=WARNING), *events)
    assert found == [None, None, None, Change.OPENED, Change.CLOSED]


def test_the_sentence_names_ranks_steps_and_what_to_do():
    text = sentence(FINDING, Change.OPENED)
    assert text.startswith("warning: data.duplicate_batches opened on rank 1, 3 (steps 2 to 5).")
    assert text.endswith("Next: Look at the sampler.")
    assert "0, 1, 2, 3, 4, 5, 6, 7 and 92 more" in sentence(finding(ranks=tuple(range(100))))
    assert " on rank" not in sentence(finding(ranks=()))

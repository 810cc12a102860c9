"""A webhook that is taken, refused, or not there for a while."""

import logging

import pytest

from rankscope.bus.finding import Severity
from rankscope.sinks.base import SinkError, plain_finding
from rankscope.sinks.delivery import PAUSES
from rankscope.sinks.webhook import WebhookSink
from sinks.findings import FINDING, finding, run_info
from sinks.servers import WebServer, running


@pytest.fixture
def server():
    with running(WebServer) as there:
        yield there


def opened(tmp_path, url, **options):
    pauses = []
    sink = WebhookSink(url, **options)
    sink._sleep = pauses.append
    sink.open(run_info(tmp_path))
    return sink, pauses


def test_news_is_posted_as_json_with_a_text(tmp_path, server):
    sink, pauses = opened(tmp_path, server.url)
    closed = finding(status="closed")
    for event in (FINDING, FINDING, finding(severity=Severity.ERROR), closed):
        sink.finding(event)
    sink.close()
    paths, kinds, bodies, _ = zip(*server.got, strict=True)
    assert (set(paths), set(kinds)) == ({"/hook"}, {"application/json"})
    assert [body["event"] for body in bodies] == ["opened", "got worse", "closed"]
    assert bodies[0]["finding"] == plain_finding(FINDING)
    assert bodies[0]["run"] == str(tmp_path / "run")
    assert bodies[0]["text"].startswith(
        "run: warning: data.duplicate_batches opened on ranks 1 and 3"
    )
    assert FINDING.explanation in bodies[0]["text"]
    assert pauses == []


def test_slack_gets_the_text_alone_as_it_wants_it(tmp_path, server):
    sink, _ = opened(tmp_path, server.url, slack=True)
    sink.finding(FINDING)
    [(_, kind, body, _)] = server.got
    assert (kind, list(body)) == ("application/json", ["text"])
    assert "it's 50 % of &lt;the batch&gt;." in body["text"]


def test_what_fails_for_now_is_tried_again(tmp_path, server):
    server.answers = [503, 429, 500]
    sink, pauses = opened(tmp_path, server.url)
    sink.finding(FINDING)
    assert [code for *_, code in server.got] == [503, 429, 500, 200]
    assert pauses == list(PAUSES[:3])


def test_what_is_not_there_is_given_up_for_this_finding_alone(tmp_path, server, caplog):
    caplog.set_level(logging.INFO, "rankscope")
    server.answers = [500] * (1 + len(PAUSES)) * 2
    sink, pauses = opened(tmp_path, server.url)
    for name in ("a", "b", "c"):
        sink.finding(finding(id=name))
    assert len(server.got) == 2 * (1 + len(PAUSES)) + 1
    assert pauses == [*PAUSES, *PAUSES]
    [message] = [record.getMessage() for record in caplog.records]
    assert "could not send a after 7 tries (the server answered 500)" in message
    assert server.url not in message


def test_what_is_refused_for_good_ends_the_sink(tmp_path, server):
    server.answers = [404]
    sink, pauses = opened(tmp_path, server.url)
    with pytest.raises(SinkError, match="answered 404") as raised:
        sink.finding(FINDING)
    assert server.url not in str(raised.value)
    assert pauses == []


@pytest.mark.parametrize(
    ("code", "place"),
    [(301, "/moved"), (307, "http://localhost:{port}/moved"), (308, "file:///etc/hostname")],
)  # fmt: skip
def test_another_redirect_is_a_failure_and_nothing_empty_is_sent(tmp_path, server, code, place):
    server.answers = [(code, place and place.format(port=server.server_port))]
    sink, pauses = opened(tmp_path, server.url)
    with pytest.raises(SinkError, match=f"answered {code}.*give the URL that takes it") as raised:
        sink.finding(FINDING)
    assert "moved" not in str(raised.value)
    assert [got for *_, got in server.got] == [code]
    assert pauses == []

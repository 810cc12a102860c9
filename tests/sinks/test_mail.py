"""E-mail that is taken, refused, or not taken for a while."""

from dataclasses import replace

import pytest

from rankscope.bus.finding import Severity
from rankscope.sinks.base import SinkError
from rankscope.sinks.delivery import MOST_ALERTS, PASSWORD, PAUSES, USER
from rankscope.sinks.mail import MailSink
from sinks.findings import FINDING, finding, run_info
from sinks.servers import MailServer, running


@pytest.fixture
def server():
    with running(MailServer) as there:
        yield there


def opened(tmp_path, server: MailServer, **options):
    pauses: list[float] = []
    host, port = server.server_address[:2]
    to = ("ops@example.org", "me@example.org")
    sink = MailSink(to, host=str(host), port=port, **options)
    sink._sleep = pauses.append
    sink.open(run_info(tmp_path))
    return sink, pauses


def test_a_finding_is_a_message_with_its_cause_and_what_to_do(tmp_path, server):
    sink, pauses = opened(tmp_path, server, sender="jobs@example.org")
    sink.finding(FINDING)
    sink.finding(FINDING)
    [message] = server.messages
    assert server.recipients == ["<ops@example.org>", "<me@example.org>"]
    assert message["Subject"] == "rankscope: run: warning data.duplicate_batches opened"
    assert (message["From"], message["To"]) == (
        "jobs@example.org",
        "ops@example.org, me@example.org",
    )
    assert FINDING.explanation in message.get_content().replace("\n", " ")
    assert FINDING.next_check in message.get_content()
    assert pauses == []


def test_an_alert_is_of_what_opens_or_gets_worse_and_names_the_report(tmp_path, server):
    sink, _ = opened(tmp_path, server, alerts=True, severity=Severity.WARNING)
    closed = finding(status="closed")
    for event in (finding(severity=Severity.NOTE), FINDING, finding(severity=Severity.ERROR)):
        sink.finding(event)
    sink.finding(closed)
    subjects = [message["Subject"].rpartition(" data.")[0] for message in server.messages]
    assert subjects == ["rankscope: run: warning", "rankscope: run: error"]
    assert f"rankscope report {tmp_path / 'run'}" in server.messages[0].get_content()


def test_the_last_alert_of_a_run_says_so(tmp_path, server):
    sink, _ = opened(tmp_path, server, alerts=True)
    for number in range(MOST_ALERTS + 5):
        sink.finding(finding(id=str(number)))
    assert len(server.messages) == MOST_ALERTS
    ends = ["the last alert of this run" in one.get_content() for one in server.messages]
    assert ends == [False] * (MOST_ALERTS - 1) + [True]


def test_what_fails_for_now_is_tried_again_and_then_given_up(tmp_path, server, caplog):
    server.answers = ["451 later"] * 2 * 2
    sink, pauses = opened(tmp_path, server)
    sink.finding(FINDING)
    assert (len(server.messages), pauses) == (1, list(PAUSES[:2]))
    server.shutdown()
    server.server_close()
    sink.finding(finding(id="later"))
    assert pauses == [*PAUSES[:2], *PAUSES]
    [warning] = [record.getMessage() for record in caplog.records]
    assert "sink mailto could not send later after 7 tries (ConnectionRefusedError" in warning


def test_what_is_refused_for_good_ends_the_sink(tmp_path, server):
    server.answers = ["550 nobody"] * 2
    sink, pauses = opened(tmp_path, server)
    with pytest.raises(SinkError, match="answered 550: check the addresses"):
        sink.finding(FINDING)
    assert pauses == []


def test_a_login_is_never_sent_without_encryption(tmp_path, server, monkeypatch):
    monkeypatch.setenv(USER, "me")
    monkeypatch.setenv(PASSWORD, "tell-nobody")
    sink, _ = opened(tmp_path, server)
    with pytest.raises(SinkError, match="STARTTLS") as raised:
        sink.finding(FINDING)
    assert "tell-nobody" not in str(raised.value)
    assert server.messages == []


def test_a_name_with_line_breaks_makes_no_header(tmp_path, server):
    sink, _ = opened(tmp_path, server)
    info = run_info(tmp_path)
    sink.open(replace(info, run_dir=info.run_dir.with_name("a\nBcc: you@example.org\udcff")))
    sink.finding(FINDING)
    [message] = server.messages
    assert message["Bcc"] is None
    assert "rankscope: a?Bcc: you@example.org?: warning" in message["Subject"]

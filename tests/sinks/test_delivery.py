import json
import os
import shlex
import signal
import subprocess
from dataclasses import replace

import pytest

from rankscope.bus.finding import Severity
from rankscope.sinks import command
from rankscope.sinks.base import SinkError, plain_finding
from rankscope.sinks.command import CommandSink
from rankscope.sinks.delivery import MOST_ALERTS, PASSWORD, PAUSES, USER
from rankscope.sinks.mail import MailSink
from rankscope.sinks.webhook import WebhookSink
from sinks.findings import FINDING, finding, run_info
from sinks.servers import MailServer, WebServer, running
from support.accidents import state_of, wait_until

CLOSED = finding(status="closed")


def opened(tmp_path, sink):
    """Return a sink for a run, and the pauses that it takes."""
    pauses: list[float] = []
    sink._sleep = pauses.append
    sink.open(run_info(tmp_path))
    return sink, pauses


@pytest.fixture
def web():
    with running(WebServer) as there:
        yield there


def test_news_is_posted_as_json_with_a_text(tmp_path, web):
    sink, pauses = opened(tmp_path, WebhookSink(web.url))
    for event in (FINDING, FINDING, finding(severity=Severity.ERROR), CLOSED):
        sink.finding(event)
    sink.close()
    paths, kinds, bodies, _ = zip(*web.got, strict=True)
    assert (set(paths), set(kinds)) == ({"/hook"}, {"application/json"})
    assert [body["event"] for body in bodies] == ["opened", "got worse", "closed"]
    assert bodies[0]["finding"] == plain_finding(FINDING)
    assert bodies[0]["run"] == str(tmp_path / "run")
    begins = "run: warning: data.duplicate_batches opened on ranks 1 and 3"
    assert bodies[0]["text"].startswith(begins)
    assert FINDING.explanation in bodies[0]["text"]
    assert pauses == []


def test_slack_gets_the_text_alone_as_it_wants_it(tmp_path, web):
    opened(tmp_path, WebhookSink(web.url, slack=True))[0].finding(FINDING)
    [(_, kind, body, _)] = web.got
    assert (kind, list(body)) == ("application/json", ["text"])
    assert "it's 50 % of &lt;the batch&gt;." in body["text"]


def test_a_post_that_fails_for_now_is_tried_again(tmp_path, web):
    web.answers = [503, 429, 500]
    sink, pauses = opened(tmp_path, WebhookSink(web.url))
    sink.finding(FINDING)
    assert [code for *_, code in web.got] == [503, 429, 500, 200]
    assert pauses == list(PAUSES[:3])


def test_what_is_not_there_is_given_up_for_this_finding_alone(tmp_path, web, told):
    web.answers = [500] * (1 + len(PAUSES)) * 2
    sink, pauses = opened(tmp_path, WebhookSink(web.url))
    for name in ("a", "b", "c"):
        sink.finding(finding(id=name))
    assert len(web.got) == 2 * (1 + len(PAUSES)) + 1
    assert pauses == [*PAUSES, *PAUSES]
    [message] = told()
    assert "could not send a after 7 tries (the server answered 500)" in message
    assert web.url not in message


@pytest.mark.parametrize(
    ("code", "place", "says"),
    [
        (404, None, "answered 404"),
        (301, "/moved", "answered 301.*give the URL that takes it"),
        (307, "http://localhost:{port}/moved", "answered 307.*give the URL that takes it"),
        (308, "file:///etc/hostname", "answered 308.*give the URL that takes it"),
    ],
)
def test_a_refusal_or_a_redirect_ends_the_sink_and_sends_nothing(tmp_path, web, code, place, says):
    web.answers = [(code, place and place.format(port=web.server_port))]
    sink, pauses = opened(tmp_path, WebhookSink(web.url))
    with pytest.raises(SinkError, match=says) as raised:
        sink.finding(FINDING)
    assert not any(secret in str(raised.value) for secret in ("moved", web.url))
    assert [got for *_, got in web.got] == [code]
    assert pauses == []


# Mail ---------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    with running(MailServer) as there:
        yield there


def mailing(tmp_path, server: MailServer, **options):
    host, port = server.server_address[:2]
    to = ("ops@example.org", "me@example.org")
    return opened(tmp_path, MailSink(to, host=str(host), port=port, **options))


def test_a_finding_is_a_message_with_its_cause_and_what_to_do(tmp_path, server):
    sink, pauses = mailing(tmp_path, server, sender="jobs@example.org")
    sink.finding(FINDING)
    sink.finding(FINDING)
    [message] = server.messages
    assert server.recipients == ["<ops@example.org>", "<me@example.org>"]
    assert message["Subject"] == "rankscope: run: warning data.duplicate_batches opened"
    assert message["From"] == "jobs@example.org"
    assert message["To"] == "ops@example.org, me@example.org"
    assert FINDING.explanation in message.get_content().replace("\n", " ")
    assert FINDING.next_check in message.get_content()
    assert pauses == []


def test_an_alert_is_of_what_opens_or_gets_worse_and_names_the_report(tmp_path, server):
    sink, _ = mailing(tmp_path, server, alerts=True, severity=Severity.WARNING)
    note, error = (finding(severity=each) for each in (Severity.NOTE, Severity.ERROR))
    for event in (note, FINDING, error, CLOSED):
        sink.finding(event)
    subjects = [message["Subject"].rpartition(" data.")[0] for message in server.messages]
    assert subjects == ["rankscope: run: warning", "rankscope: run: error"]
    assert f"rankscope report {tmp_path / 'run'}" in server.messages[0].get_content()


def test_the_last_alert_of_a_run_says_so(tmp_path, server):
    sink, _ = mailing(tmp_path, server, alerts=True)
    for number in range(MOST_ALERTS + 5):
        sink.finding(finding(id=str(number)))
    ends = ["the last alert of this run" in one.get_content() for one in server.messages]
    assert ends == [False] * (MOST_ALERTS - 1) + [True]


def test_mail_that_fails_for_now_is_tried_again_and_then_given_up(tmp_path, server, told):
    server.answers = ["451 later"] * 2 * 2
    sink, pauses = mailing(tmp_path, server)
    sink.finding(FINDING)
    assert (len(server.messages), pauses) == (1, list(PAUSES[:2]))
    server.shutdown()
    server.server_close()
    sink.finding(finding(id="later"))
    assert pauses == [*PAUSES[:2], *PAUSES]
    [warning] = told()
    assert "sink mailto could not send later after 7 tries (ConnectionRefusedError" in warning


def test_mail_that_is_refused_for_good_ends_the_sink(tmp_path, server):
    server.answers = ["550 nobody"] * 2
    sink, pauses = mailing(tmp_path, server)
    with pytest.raises(SinkError, match="answered 550: check the addresses"):
        sink.finding(FINDING)
    assert pauses == []


def test_a_login_is_never_sent_without_encryption(tmp_path, server, monkeypatch):
    monkeypatch.setenv(USER, "me")
    monkeypatch.setenv(PASSWORD, "tell-nobody")
    sink, _ = mailing(tmp_path, server)
    with pytest.raises(SinkError, match="STARTTLS") as raised:
        sink.finding(FINDING)
    assert "tell-nobody" not in str(raised.value)
    assert server.messages == []


def test_a_name_with_line_breaks_makes_no_header(tmp_path, server):
    sink, _ = mailing(tmp_path, server)
    info = run_info(tmp_path)
    sink.open(replace(info, run_dir=info.run_dir.with_name("a\nBcc: you@example.org\udcff")))
    sink.finding(FINDING)
    [message] = server.messages
    assert message["Bcc"] is None
    assert "rankscope: a?Bcc: you@example.org?: warning" in message["Subject"]


# A command ----------------------------------------------------------------------------------------


def commanding(tmp_path, line):
    out = tmp_path / "out"
    return opened(tmp_path, CommandSink(line.replace("OUT", shlex.quote(str(out)))))[0], out


def test_a_command_gets_the_finding_on_its_input_and_in_its_environment(tmp_path, told):
    line = "cat >> OUT; echo >> OUT; env | grep ^RANKSCOPE_ | sort >> OUT"
    sink, out = commanding(tmp_path, line)
    sink.finding(FINDING)
    sink.finding(FINDING)
    sink.close()
    first, *variables = out.read_text().splitlines()
    assert json.loads(first) == plain_finding(FINDING)
    found = dict(line.split("=", 1) for line in variables)
    assert {name: found[name] for name in found.keys() - os.environ.keys()} == {
        "RANKSCOPE_EVENT": "opened",
        "RANKSCOPE_RUN_DIR": str(tmp_path / "run"),
        "RANKSCOPE_ID": FINDING.id,
        "RANKSCOPE_CAUSE": FINDING.cause,
        "RANKSCOPE_SEVERITY": "warning",
        "RANKSCOPE_RANKS": "1,3",
        "RANKSCOPE_STEP": "5",
        "RANKSCOPE_EXPLANATION": FINDING.explanation,
        "RANKSCOPE_NEXT_CHECK": FINDING.next_check,
    }
    assert told() == []


def test_one_that_reads_to_the_end_ends_while_a_fork_holds_all_files(tmp_path, told, monkeypatch):
    forks = []

    class Forking(subprocess.Popen):
        """Starts a process; a data loader's worker is forked just then."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            forks.append(os.fork())
            if not forks[-1]:
                signal.pause()
                os._exit(0)

    monkeypatch.setattr(subprocess, "Popen", Forking)
    sink, out = commanding(tmp_path, "cat > OUT")
    try:
        sink.finding(FINDING)
    finally:
        for pid in forks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert len(forks) == 1
    assert json.loads(out.read_text()) == plain_finding(FINDING)
    assert told() == []


def test_one_that_takes_too_long_is_killed_with_its_children(tmp_path, told, monkeypatch):
    monkeypatch.setattr(command, "SECONDS", 1.5)
    sink, out = commanding(tmp_path, "sleep 600 & echo $! $$ > OUT; sleep 600")
    sink.finding(FINDING)
    [message] = told()
    assert "took longer than 1.5 s and was killed" in message
    started = [int(pid) for pid in out.read_text().split()]
    assert len(started) == 2
    wait_until(lambda: all(state_of(pid) in ("", "Z") for pid in started))
    assert os.getpid() not in started

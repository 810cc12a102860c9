"""Alerts of a real training: sent by the agent, their places nowhere else."""

import logging
import os
import sys

import pytest

from rankscope import Run, WatchOptions
from rankscope.report import write_report
from rankscope.session.start import ALERTS
from sinks.servers import MailServer, WebServer, running
from support.loops import Loop
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

SECRET = "tell-nobody"
NUM_STEPS = 14


def train(rank, folder, hook, mail):
    """Train on rank 0's batches everywhere; the places come by option, and by environment."""
    logging.getLogger("rankscope").setLevel(logging.DEBUG)
    watched = []
    for name, alerts in (("option", [hook, mail]), ("environment", ())):
        if not alerts:
            os.environ[ALERTS] = f"{hook} {mail}"
        loop = Loop(rank, f"{folder}/{name}", agent="process", alerts=alerts, announce=True)
        for step in range(NUM_STEPS):
            loop.step(step, rank=0)
        loop.close()
        watched.append(loop)
    plain = Loop(rank, None)
    for step in range(NUM_STEPS):
        plain.step(step, rank=0)
    sent_here = {"rankscope.sinks.webhook", "rankscope.sinks.mail"} & set(sys.modules)
    bits = [loop.bits() == plain.bits() for loop in watched]
    return [loop.warnings for loop in watched], bits, sent_here


def test_alerts_come_from_the_agent_and_their_places_are_recorded_nowhere(tmp_path):
    with running(WebServer) as http, running(MailServer) as mail:
        hook = f"slack:http://127.0.0.1:{http.server_port}/T0/{SECRET}"
        mailto = f"mailto:{SECRET}@example.org?smtp={mail.place}"
        results = run_ranks(train, 2, str(tmp_path), hook, mailto)
        messages, recipients = list(mail.messages), set(mail.recipients)
        got = list(http.got)
    assert results == [([[], []], [True, True], set())] * 2
    assert {path for path, *_ in got} == {f"/T0/{SECRET}"}
    assert all(body.keys() == {"text"} for _, _, body, _ in got)
    for name in ("option", "environment"):
        text = next(body["text"] for _, _, body, _ in got if body["text"].startswith(f"{name}: "))
        assert "data.duplicate_batches opened on ranks 0 and 1" in text
        assert f"rankscope report {tmp_path / name}" in text
        run = Run.open(tmp_path / name)
        write_report(run)
        files = [path for path in run.path.rglob("*") if path.is_file()]
        assert run.path / "report.html" in files
        assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert recipients == {f"<{SECRET}@example.org>"}
    assert {str(one["Subject"]).split(": ")[1] for one in messages} == {"option", "environment"}
    assert SECRET not in repr(WatchOptions(alerts=[hook, mailto]))

"""A shell command on a finding."""

import json
import logging
import os
import shlex
import signal
import subprocess

import pytest

from rankscope.sinks import command
from rankscope.sinks.base import plain_finding
from rankscope.sinks.command import CommandSink
from sinks.findings import FINDING, run_info
from support.accidents import state_of, wait_until


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.INFO, "rankscope")
    return lambda: [record.getMessage() for record in caplog.records]


def opened(tmp_path, line):
    sink = CommandSink(line)
    sink.open(run_info(tmp_path))
    return sink


def test_a_command_gets_the_finding_on_its_input_and_in_its_environment(tmp_path, told):
    out = shlex.quote(str(tmp_path / "out"))
    sink = opened(tmp_path, f"cat >> {out}; echo >> {out}; env | grep ^RANKSCOPE_ | sort >> {out}")
    sink.finding(FINDING)
    sink.finding(FINDING)
    sink.close()
    first, *variables = (tmp_path / "out").read_text().splitlines()
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


def test_one_that_reads_its_input_to_the_end_ends_while_a_fork_holds_all_files(
    tmp_path, told, monkeypatch
):
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
    out = shlex.quote(str(tmp_path / "out"))
    sink = opened(tmp_path, f"cat > {out}")
    try:
        sink.finding(FINDING)
    finally:
        for pid in forks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert len(forks) == 1
    assert json.loads((tmp_path / "out").read_text()) == plain_finding(FINDING)
    assert told() == []


def test_one_that_takes_too_long_is_killed_with_its_children(tmp_path, told, monkeypatch):
    monkeypatch.setattr(command, "SECONDS", 1.5)
    pids = tmp_path / "pids"
    out = shlex.quote(str(pids))
    sink = opened(tmp_path, f"sleep 600 & echo $! $$ > {out}; sleep 600")
    sink.finding(FINDING)
    [message] = told()
    assert "took longer than 1.5 s and was killed" in message
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    wait_until(lambda: all(state_of(pid) in ("", "Z") for pid in started))
    assert os.getpid() not in started

"""How the end of a script decides whether its run is complete, without ranks."""

import builtins
import json
import os
import sys
from types import SimpleNamespace

import pytest

from rankscope.integrations.catch import NOTHING, Ending, report_if_nothing_was_watched
from rankscope.integrations.run_script import PID_VARIABLE, VARIABLE


class Watching:
    """A training that is being watched, as far as its end goes."""

    scope = SimpleNamespace(run_dir=None)

    def close(self, error):
        self.error = error


@pytest.fixture
def ending(monkeypatch):
    """Return the end of a script in which something is watched; Python is put back after it."""
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(type(builtins.exit), "__call__", type(builtins.exit).__call__)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(close=lambda: None))
    monkeypatch.setattr("atexit.register", lambda function: None)
    ending = Ending()
    ending.attach(Watching())
    ending.notice_exit_codes()
    return ending


def closed_with(ending):
    watching = ending._watching
    ending._finish()
    return watching.error


@pytest.mark.parametrize(("name", "code"), [("sys.exit", 3), ("exit", "a message"), ("quit", None)])
def test_a_script_that_ends_itself_with_a_code_is_noticed(ending, name, code):
    leave = sys.exit if name == "sys.exit" else getattr(builtins, name)
    with pytest.raises(SystemExit) as raised:
        leave(code)
    assert raised.value.code == code
    error = closed_with(ending)
    assert (error.code if code else error) == (code or None)


@pytest.fixture
def unreported(monkeypatch, tmp_path):
    """Return the file that stays until a process of this one's job has told."""
    path = tmp_path / "unreported"
    path.touch()
    run_dir = str(tmp_path / "run")
    job = {"run_dir": run_dir, "script": "train", "started": 0.0, "unreported": str(path)}
    monkeypatch.setenv(VARIABLE, json.dumps(job))
    monkeypatch.setenv(PID_VARIABLE, str(os.getpid()))
    monkeypatch.delenv("RANK", raising=False)
    return path


def test_what_nobody_of_the_job_has_told_is_told_once(unreported, capsys):
    report_if_nothing_was_watched()
    report_if_nothing_was_watched()
    assert capsys.readouterr().err == f"rankscope: {NOTHING}\n"
    assert not unreported.exists()


@pytest.mark.parametrize("reason", ["a rank has told", "a run beside", "another rank"])
def test_a_launcher_whose_ranks_were_watched_tells_nothing(unreported, capsys, monkeypatch, reason):
    if reason == "a rank has told":  # as on a host without rank 0
        unreported.unlink()
    elif reason == "another rank":
        monkeypatch.setenv("RANK", "1")
    else:
        run_dir = unreported.with_name("run-2")
        run_dir.mkdir()
        (run_dir / "run.json").touch()
    report_if_nothing_was_watched()
    assert capsys.readouterr().err == ""
    assert not unreported.exists()

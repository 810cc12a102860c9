"""How the end of a script decides whether its run is complete, without ranks."""

import builtins
import sys
from types import SimpleNamespace

import pytest

from rankscope.integrations.catch import Ending


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

"""What all tests share."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub: no test needs the hub

# Before anything imports torch, and for all commands that tests start: several processes run at
# once, and threads that wait for each other in turn would burn ten times the work itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A process for each run of a test would cost more than the test itself. Those that are about the
# process say agent="process".
os.environ.setdefault("RANKSCOPE_AGENT", "thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the tests of a module share."""
    return tmp_path_factory.mktemp("module")


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command here: its exit code, output and errors."""
    from rankscope.cli import main

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["rankscope", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main.run()
        code = ended.value.code or 0
        assert isinstance(code, int)
        return (code, *capsys.readouterr())

    return call


USUAL = "tests/scope/test_canary.py::test_a_worker_with_bad_labels_has_bad_data_and_nothing_else"
"""One canary of a finding is expected there in 70 steps, where many follow each other if eager."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files with slow tests first; if all is due at once, leave out tests of the usual pace."""
    from rankscope.bus.pace import EAGER, PACE  # here, since it imports torch

    if PACE is EAGER:
        usual = [item for item in items if item.nodeid.startswith(USUAL)]
        items[:] = [item for item in items if item not in usual]
        config.hook.pytest_deselected(items=usual)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)

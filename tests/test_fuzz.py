"""A short part of ``make fuzz``, and that it sees what it looks for."""

import os
import signal
import time
from pathlib import Path

import pytest

from support import limited
from support.benchmarks import load_benchmark

ONCE_FAILED = [174]


@pytest.mark.slow
def test_mutations_are_refused_in_words_or_read():
    assert [*load_benchmark("fuzz").run([*ONCE_FAILED, *range(1_000_000, 1_000_012)])] == []


def test_each_kind_of_failure_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    err = tmp_path / "err"
    assert "ZeroDivisionError" in str(limited.forked(lambda: print(1 // 0), err))
    killed = limited.forked(lambda: os.kill(os.getpid(), signal.SIGKILL), tmp_path / "none")
    assert killed == f"code {-signal.SIGKILL}: "
    monkeypatch.setattr(limited, "SECONDS", 0.2)
    assert limited.forked(lambda: time.sleep(600), tmp_path / "none") == "hang"

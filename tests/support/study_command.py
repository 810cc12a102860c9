"""Runs ``rankscope study`` with real workers: in a process of its own, or one after the other.

The tests of a file share a cache with a base model. Its data is a small file of short records, and
its training a few steps: what these tests hold does not depend on a good one.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import pyarrow as pa

from rankscope.bus.evidence import Table
from rankscope.lab.study.builtin import generate
from rankscope.record import Run
from support.study_host import Host

TIMEOUT = 240.0
Record = dict[str, str]
Ended: TypeAlias = subprocess.CompletedProcess[str]


def short_records() -> list[Record]:
    """Return records of the built-in kind that are short, so that all is fast."""
    rows = (row for row in generate(7) if len(row["output"]) < 30 and len(row["input"]) < 40)
    return [row for row, _ in zip(rows, range(240), strict=False)]


def _cache_base(data: Path, cache: Path) -> None:
    """Put a base model of 8 steps where a study on this data looks for its own."""
    from rankscope.lab.study import base
    from rankscope.lab.study.data import load_records

    def train(model: Any, samples: Any, steps: int, *rest: Any) -> list[float]:
        return trained(model, samples, 8, *rest)

    trained = base.train
    with patch.object(base, "train", train):
        records = load_records(str(data), seed=0).held_out
        base.load_base(records, seed=0, cache_dir=cache / "rankscope")


class StudyCommand:
    """``rankscope study`` with its own data, short records, and its own cache, both in a folder.

    A process of its own is what a user starts. What many tests need are studies that just run:
    :meth:`call` does them one after the other in a common process, which imports torch once.
    """

    def __init__(self, folder: Path, *, unusable: bool = False) -> None:
        self.folder = folder
        self._host: Host | None = None
        self.data = folder / ("records.jsonl" if unusable else "records.json")
        rows = short_records()
        if unusable:
            rows[3]["output"] = ""
            rows[5]["output"] = " \n"
            rows[7]["instruction"] = "word " * 400
        self.data.write_text("\n".join(map(json.dumps, rows)) if unusable else json.dumps(rows))
        _cache_base(self.data, folder / "cache")
        self.environment = {
            **os.environ,
            "XDG_CACHE_HOME": str(folder / "cache"),
            "COLUMNS": "200",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def arguments(self, output: Path, options: Mapping[str, Any]) -> list[str]:
        """Return the words behind ``rankscope``; an option of True is a flag."""
        chosen = {"data": self.data, "workers": 2, "steps": 3, "batch_size": 2, **options}
        words = ["study", "--output", str(output)]
        for name, value in chosen.items():
            words.append(f"--{name.replace('_', '-')}")
            if value is not True:
                words.append(str(value))
        return words

    def run(self, output: Path, **options: Any) -> Ended:
        """Run a study to its end, as a user does: with its figures, in a process of its own."""
        return subprocess.run(
            [sys.executable, "-m", "rankscope", *self.arguments(output, options)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=TIMEOUT,
            check=False,
        )

    def call(self, output: Path, **options: Any) -> Ended:
        """Run a study to its end, without its figures, in the process that all calls share."""
        return self._process().run(self.arguments(output, options), TIMEOUT)

    def begin(self, output: Path, **options: Any) -> "Begun":
        """Begin a study, without its figures, in the process that all calls share."""
        return Begun(self._process(), self.arguments(output, options))

    def close(self) -> tuple[int, str]:
        """End that process; return its exit code and what was said since the last call began."""
        host, self._host = self._process(), None
        return host.close()

    def _process(self) -> Host:
        if self._host is None:
            folder = Path(tempfile.mkdtemp(prefix="host-", dir=self.folder))
            self._host = Host(folder, self.environment)
        return self._host


class Begun:
    """A study that runs in the process that all calls share, which has to be used already.

    Only what that process needs for every study is then left after this one.
    """

    def __init__(self, host: Host, words: list[str]) -> None:
        self._host, self._words = host, words
        host.begin(words)

    def interrupt(self) -> None:
        """Send SIGINT to all processes, as a terminal does."""
        os.killpg(self._host.pid, signal.SIGINT)

    def terminate(self) -> None:
        """Send SIGTERM to the process that launched the workers, and to nothing else."""
        os.kill(self._host.pid, signal.SIGTERM)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds while the study runs; it must not end before."""
        end = time.monotonic() + TIMEOUT
        while not condition():
            if self._host.has_ended() or time.monotonic() > end:
                ended = self._host.end(self._words, 0.0)
                raise AssertionError(f"the condition never held; the study said:\n{ended.stderr}")
            time.sleep(0.02)

    def finish(self) -> Ended:
        """Wait for its end and return what it said; no process of it may be left."""
        ended = self._host.end(self._words, TIMEOUT)
        end = time.monotonic() + TIMEOUT
        while left := self._host.workers():
            assert time.monotonic() < end, f"the study left processes behind: {left}"
            time.sleep(0.02)
        return ended


class Done:
    def __init__(self, path: Path, process: Ended) -> None:
        self.path = path
        self.code = process.returncode
        self.out, self.err = process.stdout, process.stderr

    def summary(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = json.loads((self.path / "summary.json").read_text())
        return entries

    def columns(self, name: str, table: Table, *names: str) -> dict[str, Any]:
        return Run.open(self.path / "runs" / name).columns(table, *names)


def has_rows(run: Path) -> bool:
    """Return whether some steps of a run are on disk."""
    return any((run / "steps").glob("*.parquet"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def tables(run: Path) -> dict[Table, pa.Table]:
    """Return what a run measured, without the columns that hold times."""
    read = {table: Run.open(run).table(table) for table in Table}
    return {table: rows.select(_timeless(rows.column_names)) for table, rows in read.items()}


def _timeless(names: list[str]) -> list[str]:
    return [name for name in names if name != "time" and not name.endswith("seconds")]


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change of all files below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in files
    }

"""Runs ``rankscope study`` with real workers: in a process of its own, or one after the other.

The tests of a file share a cache with a base model. Its data is a small file of short records, and
its training a few steps: what these tests hold does not depend on a good one.
"""

import json
import os
import subprocess
import sys
from unittest.mock import patch

from rankscope.bus.evidence import Table
from rankscope.lab.study.builtin import generate
from rankscope.record import Run
from support.study_host import SECONDS, Host


def short_records():
    """Return records of the built-in kind that are short, so that all is fast."""
    rows = (row for row in generate(7) if len(row["output"]) < 30 and len(row["input"]) < 40)
    return [row for row, _ in zip(rows, range(240), strict=False)]


def _cache_base(data, cache):
    """Put a base model of 8 steps where a study on this data looks for its own."""
    from rankscope.lab.study import base
    from rankscope.lab.study.data import load_records

    def train(model, samples, steps, *rest):
        return trained(model, samples, 8, *rest)

    trained = base.train
    with patch.object(base, "train", train):
        records = load_records(str(data), seed=0).held_out
        base.load_base(records, seed=0, cache_dir=cache / "rankscope")


class StudyCommand:
    """``rankscope study`` with its own data, short records, and its own cache, both in a folder.

    A process of its own is what a user starts. What many tests need are studies that just run:
    :meth:`begin` does them one after the other in a common process, which imports torch once.
    """

    def __init__(self, folder, *, unusable=False):
        self.folder = folder
        self.host = None
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

    def arguments(self, output, options):
        """Return the words behind ``rankscope``; an option of True is a flag."""
        chosen = {"data": self.data, "workers": 2, "steps": 3, "batch_size": 2, **options}
        words = ["study", "--output", str(output)]
        for name, value in chosen.items():
            words.append(f"--{name.replace('_', '-')}")
            if value is not True:
                words.append(str(value))
        return words

    def run(self, output, **options):
        return subprocess.run(
            [sys.executable, "-m", "rankscope", *self.arguments(output, options)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=SECONDS,
            check=False,
        )

    def begin(self, output, **options):
        """Begin a study, without its figures, in the process that all of these share."""
        if self.host is None:
            self.host = Host(self.folder, self.environment)
        self.host.begin(self.arguments(output, options))
        return self.host


class Done:
    def __init__(self, path, process):
        self.path = path
        self.code = process.returncode
        self.out, self.err = process.stdout, process.stderr

    def summary(self):
        return json.loads((self.path / "summary.json").read_text())

    def columns(self, name, table, *names):
        return Run.open(self.path / "runs" / name).columns(table, *names)


def has_rows(run):
    return any((run / "steps").glob("*.parquet"))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def tables(run):
    """Return what a run measured, without the columns that hold times."""
    read = {table: Run.open(run).table(table) for table in Table}
    return {table: rows.select(_timeless(rows.column_names)) for table, rows in read.items()}


def _timeless(names):
    return [name for name in names if name != "time" and not name.endswith("seconds")]


def tree(folder):
    """Return size and time of change of all files below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in files
    }

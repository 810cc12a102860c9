"""Mutates runs, studies, bundles, data and plans on disk, and reads each as commands do.

Each case is a fork with a limit on memory and on time. A case fails by a traceback (an error that
is not ours), a signal, a hang or too much memory; a refusal in words is what is wanted.

    PYTHONPATH=tests python benchmarks/fuzz.py
"""

import argparse
import importlib
import json
import multiprocessing as mp
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rankscope.bus.bundles import PlainBatch, ReplayBundle, load_bundle, save_bundle
from rankscope.bus.finding import Finding, Severity
from rankscope.cli.report import FailOn, report
from rankscope.cli.run import _plan
from rankscope.lab.study.data import load_records
from rankscope.report.live.board import Board

recorded: Any = importlib.import_module("report.recorded_runs")
limited: Any = importlib.import_module("support.limited")

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**9, 10**30, 1e308, float("inf"), float("nan"), "x", "\ud800", "\0"),
    *([], {}, [[1]], {"a": {"b": [None]}}, [10**30, -1]),
)
DEEP = b"[" * 20_000 + b"]" * 20_000


def make(folder: Path) -> dict[str, Path]:
    recorded.record_run(folder / "run", num_workers=3, num_steps=8, change=recorded.with_everything)
    recorded.record_run(folder / "copied", reading="replicated", setting="s1-2", num_steps=8)
    recorded.record_study(folder / "study", num_steps=2)
    batch = PlainBatch(
        {"tuple": [{"tensor": 0, "dtype": "float32", "host": False}, {"float": "nan"}]},
        (np.ones((4, 2), np.float32),),
        np.arange(4),
    )
    finding = Finding("rank-1", "data.worker_outlier", Severity.WARNING, (1,), 3, 9, "It.", "Go.")
    bundle = ReplayBundle("rank-1", 6, 1, 0, 2, 7, "", (batch, batch), finding)
    save_bundle(folder, bundle)
    (folder / "replay" / bundle.name).rename(folder / "bundle")
    rows = [{"instruction": f"Say {i}", "input": "", "output": str(i)} for i in range(5000)]
    plan = {"learning_rate": [0.1, 0.2], "repeats": True, "seed": 3}
    for name, content in {"data": rows[:40], "plan": plan}.items():
        (folder / name).mkdir()
        (folder / name / f"{name}.json").write_text(json.dumps(content))
    return {name: folder / name for name in ("run", "copied", "study", "bundle", "data", "plan")}


def read(kind: str, place: Path, chosen: random.Random) -> None:
    if kind in ("run", "copied"):
        if chosen.random() < 0.25:
            board = Board(place.parent)
            board.sheet("runs")
            board.sheet(f"run:{place.name}")
            return
        _report(place, chosen.choice(("json", "md", "json", "html")), again=chosen.random() < 0.3)
    elif kind == "study":
        _report(place, chosen.choice(("json", "md")), again=False)
    elif kind == "bundle":
        load_bundle(place)
    elif kind == "data":
        load_records(str(place / "data.json"))
    else:
        _plan(str(place / "plan.json"))


def _report(place: Path, name: str, *, again: bool) -> None:
    as_json, out = name == "json", place.parent / f"out.{name}"
    formats, html = (None, False) if as_json else ([name], None)
    report(place, as_json, FailOn.ERROR, formats, html, out, again)


def mutate(place: Path, chosen: random.Random) -> str:
    file = chosen.choice([path for path in sorted(place.rglob("*")) if path.is_file()])
    ways: list[Callable[[bytes, random.Random], bytes]] = [flip, cut, swap]
    structural = {".json": tree, ".jsonl": lines, ".parquet": table}.get(file.suffix)
    if structural is not None:
        ways += [structural] * 4
    if chosen.random() < 0.03:
        os.truncate(file, 2**30)  # a few kilobytes on disk
        return f"stretch {file.relative_to(place)}"
    way = chosen.choice(ways)
    file.write_bytes(way(file.read_bytes(), chosen))
    return f"{way.__name__} {file.relative_to(place)}"


def flip(content: bytes, chosen: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chosen.choice((1, 3, 20)) if content else 0):
        changed[chosen.randrange(len(changed))] = chosen.randrange(256)
    return bytes(changed)


def cut(content: bytes, chosen: random.Random) -> bytes:
    return content[: chosen.randrange(len(content) + 1)]


def swap(content: bytes, chosen: random.Random) -> bytes:
    a, b, c = sorted(chosen.randrange(len(content) + 1) for _ in range(3))
    return content[:a] + content[b:c] + content[a:b] + content[c:]


def tree(content: bytes, chosen: random.Random) -> bytes:
    """Put another value, a deep one or a second key, somewhere into JSON."""
    value = json.loads(content)
    places = list(_places(value))
    if not places or chosen.random() < 0.05:
        return chosen.choice((DEEP, *(json.dumps(one).encode() for one in VALUES)))
    holder, key = chosen.choice(places)
    if chosen.random() < 0.15 and isinstance(holder, dict):
        del holder[key]
        return json.dumps(value).encode()
    holder[key] = "@MARK@"
    new = json.dumps(chosen.choice(VALUES)).encode() if chosen.random() < 0.9 else DEEP
    if isinstance(holder, dict) and chosen.random() < 0.1:
        new += b", " + json.dumps(key).encode() + b": 1"
    return json.dumps(value).encode().replace(b'"@MARK@"', new)


def lines(content: bytes, chosen: random.Random) -> bytes:
    found = [line for line in content.split(b"\n") if line]
    if not found:
        return b"[]\n{}\n"
    at = chosen.randrange(len(found))
    found[at] = tree(found[at], chosen)
    return b"\n".join(found) + b"\n" * chosen.randrange(2)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


def table(content: bytes, chosen: random.Random) -> bytes:
    rows = pq.read_table(pa.BufferReader(content))
    names, length = rows.column_names, len(rows)
    at = chosen.randrange(len(names))
    name = names[at]
    columns: dict[str, Callable[[], pa.Array]] = {
        "null": lambda: pa.nulls(length, rows.schema[at].type),
        "strings": lambda: pa.array(["zz"] * length),
        "bytes": lambda: pa.array([b"\xff\xfe"] * length),
        "times": lambda: pa.array(np.arange(length)).cast(pa.timestamp("us")),
        "huge": lambda: pa.array(np.full(length, 2**62)),
        "one huge": lambda: pa.array(np.where(np.arange(length) == length - 1, 2**62, 1)),
        "negative": lambda: pa.array(-np.arange(length) - 5),
        "nan": lambda: pa.array(np.full(length, np.nan)),
        "infinite": lambda: pa.array(np.full(length, np.inf)),
        "nested": lambda: pa.array([[1]] * length),
        "lengths": lambda: pa.array([[1.0] * (i % 5) for i in range(length)]),
    }
    ways: dict[str, Callable[[], pa.Table]] = {
        "twice": lambda: rows.append_column(name, rows[name]),
        "without": lambda: rows.drop_columns([name]),
        "only": lambda: rows.select([name]),
        "empty": lambda: rows.slice(0, 0),
        "fewer": lambda: rows.slice(chosen.randrange(length + 1)),
        "mixed": lambda: rows.take(pa.array(np.random.default_rng(1).permutation(length))),
        "doubled": lambda: pa.concat_tables([rows, rows]),
        "bytes in text": lambda: _not_utf8(rows),
    }
    if chosen.random() < 0.6:
        rows = rows.set_column(at, name, columns[chosen.choice(list(columns))]())
    else:
        rows = ways[chosen.choice(list(ways))]()
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink)
    written: bytes = sink.getvalue().to_pybytes()
    return written


def _not_utf8(rows: pa.Table) -> pa.Table:
    for at, field in enumerate(rows.schema):
        if pa.types.is_string(field.type):
            bad = pa.array([b"\xff\xfe"] * len(rows), pa.binary()).view(pa.string())
            rows = rows.set_column(at, field.name, bad)
    return rows


def one(seed: int, made: dict[str, Path], folder: Path) -> str | None:
    chosen = random.Random(seed)
    kind = chosen.choice((*made, "run", "run", "copied"))
    place = folder / str(seed) / kind
    shutil.copytree(made[kind], place)
    try:
        how = mutate(place, chosen)
        failed: str | None = limited.forked(lambda: read(kind, place, chosen), place.parent / "err")
        return failed and f"seed {seed}: {kind}, {how}: {failed}"
    finally:
        shutil.rmtree(place.parent)


def run(seeds: Iterable[int], each: Callable[..., Any] = map) -> Iterator[str]:
    """Make and read cases; yield what fails. ``each`` may be the ``imap`` of a pool."""
    with tempfile.TemporaryDirectory(prefix="rankscope-fuzz-") as name:
        made = make(Path(name) / "made")
        yield from filter(None, each(partial(one, made=made, folder=Path(name)), seeds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for option, default in (("--cases", 10_000), ("--seed", 0), ("--processes", 2)):
        parser.add_argument(option, type=int, default=default)
    wanted = parser.parse_args()
    counts: Counter[str] = Counter()
    with mp.get_context("fork").Pool(wanted.processes) as pool:
        for failed in run(range(wanted.seed, wanted.seed + wanted.cases), pool.imap_unordered):
            print(json.dumps(failed), flush=True)
            counts[failed.split(": ")[2].split(":")[0]] += 1
    print(f"{wanted.cases} cases; failures: {dict(counts) or 'none'}")
    return bool(counts)


if __name__ == "__main__":
    sys.exit(main())

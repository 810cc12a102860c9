"""How fast a long run opens: a synthetic run of W workers and T steps, and what reads it.

Run as ``python benchmarks/large_run.py`` (about five minutes, 2 GB of disk), or with sizes of its
own: ``--sizes 8x1000 64x10000``. With ``--writer``, what roll-ups add to the writer's work instead.

The run has the tables, columns, part sizes and row groups of a recorded one, and its roll-ups come
from the writer's own code. Its noise repeats every few steps and has few different values, so that
the largest run needs little disk; the means in its roll-ups compress no better than real ones.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from large_run_made import BATCH, EIGHT, FLUSH, SPIKE, make_run

from rankscope.core.signals import DType, Source, Table, signals
from rankscope.core.step import GatheredStep, StepReport
from rankscope.record import RunWriter, writer
from rankscope.record.rollups import RollupRows


def measure(path: Path) -> dict[str, float]:
    """Return seconds by what was done, in this process, and the memory that it took."""
    from rankscope.diagnose.assessment import assess
    from rankscope.record import Run
    from rankscope.web.document import render
    from rankscope.web.page import run_view
    from rankscope.web.parts import Tables

    times: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = work()
        times[name] = time.perf_counter() - begin
        return result

    begin = time.perf_counter()
    run = timed("open", lambda: Run.open(path))
    assessment = timed("assess", lambda: assess(run))
    tables = Tables()
    view = timed("run_view", lambda: run_view(tables, run, assessment))
    context = {"view": view, "title": view.verdict.title}
    page = timed("render", lambda: render("run.html", context, view.specs, tables))
    times["page in all"] = time.perf_counter() - begin
    for name in ("loss", "grad_norm", "cosine_rest", "step_seconds"):
        found = timed(f"overview {name}", partial(run.overview, name))
    high = run.overview("loss").high_BW
    assert np.nanmax(high) == SPIKE, "the overview lost a spike of one step"
    assert len(found.first_B) <= 240
    timed("overviews of 8 signals", lambda: run.overviews(*EIGHT))
    timed("version token", lambda: run.version)
    times["page, MB"] = len(page) / 1e6
    times["memory, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return times


def measure_apart(path: Path) -> dict[str, float]:
    """Measure in a process of its own, so that imports and memory are its own."""
    command = [sys.executable, __file__, "--measure", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def drop_from_cache(path: Path) -> None:
    """Ask the system to forget the contents of all files of a run."""
    for file in path.rglob("*.parquet"):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Make runs of the given sizes, and print how fast they open."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Plain)
    parser.add_argument("--sizes", nargs="+", default=["8x1000", "64x10000", "1024x100000"])
    parser.add_argument("--folder", type=Path, help="where the runs are made; kept if given")
    parser.add_argument("--writer", action="store_true", help="measure the writer instead")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
    elif options.writer:
        measure_writer()
    else:
        with tempfile.TemporaryDirectory() as temporary:
            _report(options.folder or Path(temporary), options.sizes)


def _report(folder: Path, sizes: list[str]) -> None:
    results = {}
    for size in sizes:
        num_workers, num_steps = map(int, size.split("x"))
        path = folder / size
        begin = time.perf_counter()
        if not path.exists():
            make_run(path, num_workers, num_steps)
        files = [file for file in path.rglob("*") if file.is_file()]
        megabytes = sum(file.stat().st_size for file in files) / 1e6
        rolled = sum(file.stat().st_size for file in (path / "rollups").rglob("*.parquet")) / 1e6
        seconds = time.perf_counter() - begin
        print(
            f"{size}: {len(files):,} files, {megabytes:,.0f} MB, roll-ups {rolled:,.0f} MB; "
            f"made in {seconds:.0f} s",
            flush=True,
        )
        drop_from_cache(path)
        cold = measure_apart(path)
        warm = measure_apart(path)
        results[size] = cold, warm
    print(f"\n| seconds, cold / warm | {' | '.join(results)} |")
    print(f"|---|{'---|' * len(results)}")
    for name in next(iter(results.values()))[0]:
        cells = [f"{cold[name]:.2f} / {warm[name]:.2f}" for cold, warm in results.values()]
        print(f"| {name} | {' | '.join(cells)} |")


def measure_writer(num_workers: int = 1024, num_steps: int = 640) -> None:
    """Print what recording a step costs with and without roll-ups, two writers in turns."""
    rng = np.random.default_rng(0)
    reports = [_report_of(rng, num_workers, step) for step in range(8)]
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        rolling = RunWriter(Path(folder) / "with", {})
        writer.RollupRows = _NoRollups  # type: ignore[attr-defined]
        plain = RunWriter(Path(folder) / "without", {})
        for step in range(num_steps):
            report = reports[step % 8]
            report = replace(report, gathered=replace(report.gathered, step=step))
            for name, run in (("with", rolling), ("without", plain)):
                begin = time.thread_time()
                run.add(report)
                times.setdefault(f"add, {name} roll-ups", []).append(time.thread_time() - begin)
            if step % FLUSH == FLUSH - 1:
                for name, run in (("with", rolling), ("without", plain)):
                    begin = time.thread_time()
                    run.flush()
                    spent = (time.thread_time() - begin) / FLUSH
                    times.setdefault(f"flush, {name} roll-ups", []).append(spent)
    print(f"| {num_workers:,} workers, ms a step on the thread's clock | median | mean |")
    print("|---|---|---|")
    for name, seconds in times.items():
        milliseconds = 1e3 * np.array(seconds)
        print(f"| {name} | {np.median(milliseconds):.2f} | {milliseconds.mean():.2f} |")


class _NoRollups(RollupRows):
    def add(self, rows: Mapping[Table, Any]) -> list[tuple[str, Any]]:
        return []


def _report_of(rng: np.random.Generator, num_workers: int, step: int) -> StepReport:
    local = {
        s.name: rng.normal(size=num_workers)
        if s.dtype is DType.FLOAT
        else rng.integers(0, 2, num_workers).astype(np.bool_ if s.dtype is DType.BOOL else np.int64)
        for s in signals(Table.WORKERS, Source.LOCAL)
    }
    gathered = GatheredStep(
        step=step,
        time=0.0,
        observed=True,
        workers=local,
        sketches_WK=None,
        samples=tuple(rng.integers(0, 2**62, BATCH) for _ in range(num_workers)),
    )
    return StepReport(
        gathered,
        values={s.name: 0.5 for s in signals(Table.STEPS, Source.DERIVED)},
        derived={"cosine_rest": rng.normal(size=num_workers)},
    )


class _Plain(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the description."""


if __name__ == "__main__":
    main()

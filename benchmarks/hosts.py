"""What may carry the agents' messages between hosts: gloo, or ZeroMQ with the links of rankscope.

Run ``python benchmarks/hosts.py``. Hosts are simulated on one machine: each process stands for
several, with a thread each (gloo) or a socket each (ZeroMQ). Parts:

- ``start``: time and memory of an agent's imports and of its first connection;
- ``hosts``: 16 and 128 hosts: until all are connected, and a step in which each sends 30 kB;
- ``vanish``: one of four hosts is killed in the middle;
- ``cut``: two network namespaces, their link cut for 20 seconds (needs root).
"""

import argparse
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ENGINES = ("gloo", "zmq")
NUM_PROCESSES = 4
CUT_SECONDS = 20.0
Row = dict[str, Any]


def command(engine: str, place: Path, first: int, last: int, *numbers: float) -> list[str]:
    """Return the command of a process that is some hosts of ``numbers``: world, steps, pause."""
    rest = map(str, (first, last, *numbers))
    serving = str(Path(__file__).with_name("hosts_serving.py"))
    return [sys.executable, serving, engine, str(place), *rest]


def start(*what: Any) -> "subprocess.Popen[str]":
    """Start a :func:`command`."""
    return subprocess.Popen(command(*what), stdout=subprocess.PIPE, text=True)


def lines_of(process: "subprocess.Popen[str]") -> Iterator[Row]:
    """Return what a process tells, as it does."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def spread(world: int) -> list[tuple[int, int]]:
    """Return which hosts each process stands for; the root stands alone."""
    count = min(NUM_PROCESSES, world - 1)
    ends = [1 + (world - 1) * each // count for each in range(count + 1)]
    return [(0, 1), *itertools.pairwise(ends)]


def measure_start(engine: str, times: int = 5) -> Iterator[Row]:
    """Import and connect, in a process of its own, several times; the least counts."""
    imports = {"gloo": "torch.distributed", "zmq": "rankscope.agent.hosts"}[engine]
    code = (
        "import time, sys; t = time.perf_counter(); import numpy; n = time.perf_counter() - t\n"
        f"t = time.perf_counter(); import {imports}; s = time.perf_counter() - t\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r}); import hosts_serving\n"
        "print(s, hosts_serving.resident_mb())"
    )
    command = [sys.executable, "-c", code]
    outputs = [subprocess.check_output(command, text=True) for _ in range(times)]
    seen = [list(map(float, output.split())) for output in outputs]
    yield {"import (s)": min(t for t, _ in seen), "resident (MB)": min(m for _, m in seen)}


def measure_hosts(engine: str) -> Iterator[Row]:
    """Connect many hosts, and let each send a step's 30 kB 40 times."""
    for world in (2, 16, 128):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            processes = [start(engine, place, *ends, world, 40, 0.0) for ends in spread(world)]
            told = list(lines_of(processes[0]))
            memory = max(row["rss"] for process in processes for row in [*lines_of(process), *told])
            for process in processes:
                process.wait()
        steps = [row for row in told if "wall" in row][5:]
        middle = len(steps) // 2
        yield {
            "hosts": world,
            "connected (s)": next(row["connected"] for row in told if "connected" in row),
            "step (ms)": 1e3 * sorted(row["wall"] for row in steps)[middle],
            "root's CPU a step (ms)": 1e3 * sorted(row["cpu"] for row in steps)[middle],
            "root resident (MB)": memory,
        }


def measure_vanish(engine: str) -> Iterator[Row]:
    """Kill one of four hosts after some steps; tell how the others go on."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        processes = [start(engine, place, host, host + 1, 4, 120, 0.05) for host in range(4)]
        after: list[Row] = []
        killed = 0.0
        for row in lines_of(processes[0]):
            if killed:
                after.append(row)
            elif row.get("step", -1) >= 20:
                killed = time.time()
                processes[3].kill()
        for process in processes:
            process.kill()
            process.wait()
    errors = [row for row in after if "error" in row]
    longest = max([0.0, *(row["wall"] for row in after if "wall" in row)])
    yield {
        "steps after": sum("wall" in row for row in after),
        "longest wait (s)": longest,
        "error": errors[0]["error"] if errors else "none",
    }


def measure_cut(engine: str) -> Iterator[Row]:
    """Cut the link of two hosts for 20 seconds; one step each 0.1 s."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    two_hosts = importlib.import_module("support.two_hosts")
    if two_hosts.why_not() is not None:
        yield {"left out": two_hosts.why_not()}
        return
    timeouts = ("60", "10") if engine == "gloo" else ("",)
    for timeout in timeouts:
        with tempfile.TemporaryDirectory() as folder, two_hosts.TwoHosts(Path(folder)) as hosts:
            pair = []
            for host in (0, 1):
                env = {
                    "BENCH_ADDRESS": hosts.address(host, "agents"),
                    "BENCH_TIMEOUT": timeout or "0",
                }
                env |= {"BENCH_DROP": "99", "BENCH_MASTER": hosts.address(0, "training")}
                work = command(engine, Path(folder), host, host + 1, 2, 450, 0.1)
                pair.append(hosts.start(host, work, env=env, stdout=subprocess.PIPE, text=True))
            rows: list[Row] = []
            mended = 0.0
            for row in lines_of(pair[0]):
                rows.append(row)
                if row.get("step") == 30:
                    hosts.cut()
                    timer = threading.Timer(CUT_SECONDS, hosts.mend)
                    timer.start()
                    mended = time.time() + CUT_SECONDS
            os.killpg(pair[1].pid, signal.SIGKILL)
            timer.join()
        back = [row["at"] for row in rows if "wall" in row and row["at"] > mended]
        errors = [row["error"] for row in rows if "error" in row]
        yield {
            "timeout (s)": timeout or "–",
            "steps of 450": sum("wall" in row for row in rows),
            "goes on after (s)": min(back) - mended if back else None,
            "error": errors[0] if errors else "none",
        }


PARTS = {
    "start": measure_start,
    "hosts": measure_hosts,
    "vanish": measure_vanish,
    "cut": measure_cut,
}


def render(rows: Sequence[Row]) -> str:
    """Return rows with the same columns as a table."""
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        cells = [f"{v:,.3g}" if isinstance(v, float) else str(v) for v in row.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--times", type=int, default=5, help="how often an agent is started")
    options = parser.parse_args()
    for part in options.parts.split(","):
        measure: Callable[[str], Iterator[Row]] = PARTS[part]
        if part == "start":
            measure = partial(measure_start, times=options.times)
        rows = [{"engine": engine, **row} for engine in ENGINES for row in measure(engine)]
        print(f"{part}:\n\n{render(rows)}", flush=True)


if __name__ == "__main__":
    main()

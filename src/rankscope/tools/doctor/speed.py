"""How fast ranks communicate and compute, and which of them keep the others waiting."""

import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from rankscope.bus.words import name_ranks
from rankscope.tools.doctor.stage import Bench, CheckResult, Facts, Stage, Status

BANDWIDTH = "bandwidth"
STRAGGLERS = "stragglers"

SIZES = {"1 KB": 1_000, "1 MB": 1_000_000, "25 MB": 25_000_000}
SECONDS_PER_SIZE = 0.4
MOST_REPETITIONS = 50

ROUNDS = 10
SECONDS_PER_ROUND = 0.03
SLOW = 1.3
"""Times the median from which a rank is named."""
BUSY = 1.5
"""Running processes per core from which a host's load is mentioned."""


def look(bench: Bench) -> Facts:
    """Time the all-reduce in three sizes, then a fixed computation on each worker."""
    load, cores = _load()
    return {
        "latency": {name: _latency(size, bench) for name, size in SIZES.items()},
        **_compute(bench),
        "load": load,
        "cores": cores,
    }


def judge(facts: Sequence[Facts]) -> list[CheckResult]:
    """Report bandwidths, and name the ranks that are slow."""
    return [_judge_bandwidth(facts), _judge_stragglers(facts)]


def _judge_bandwidth(facts: Sequence[Facts]) -> CheckResult:
    seconds = {name: max(float(fact["latency"][name]) for fact in facts) for name in SIZES}
    rates = {name: SIZES[name] / max(seconds[name], 1e-9) for name in SIZES}
    numbers = {name: {"seconds": seconds[name], "bytes_per_second": rates[name]} for name in SIZES}
    if len(facts) == 1:
        found = "one rank has nobody to talk to"
        return CheckResult(BANDWIDTH, Status.SKIPPED, found)
    parts = (f"{name} {_time(seconds[name])} ({_rate(rates[name])})" for name in SIZES)
    return CheckResult(BANDWIDTH, Status.OK, ", ".join(parts), numbers=numbers)


def _judge_stragglers(facts: Sequence[Facts]) -> CheckResult:
    seconds = [float(fact["compute"]) for fact in facts]
    usual = median(seconds)
    slow = tuple(rank for rank, value in enumerate(seconds) if value > SLOW * usual)
    numbers: dict[str, Any] = {
        "compute_seconds": seconds,
        "waiting_seconds": [float(fact["waiting"]) for fact in facts],
        "load": [fact["load"] for fact in facts],
        "cores": [fact["cores"] for fact in facts],
    }
    busy = [r for r, fact in enumerate(facts) if (fact["load"] or 0) > BUSY * fact["cores"]]
    load = ""
    if busy:
        fact = facts[busy[0]]
        load = f"; load {fact['load']:.1f} on {fact['cores']} cores at {name_ranks(busy)}"
    if slow and len(facts) > 1:
        by_size = sorted(slow, key=lambda rank: -seconds[rank])
        slowest = ", ".join(f"rank {rank} {seconds[rank] / usual:.1f} ×" for rank in by_size[:6])
        more = f" and {len(slow) - 6} more" if len(slow) > 6 else ""
        return CheckResult(
            STRAGGLERS,
            Status.NOTE,
            f"slower than the median at the same computation: {slowest}{more}{load}",
            "All ranks wait for the slowest in each step. Look for other processes, heat or "
            "power limits, or another kind of device at these ranks; repeat the preflight.",
            numbers,
            slow,
        )
    factor = max(seconds) / usual if usual else 1.0
    found = f"the slowest takes {factor:.2f} × the median{load}"
    return CheckResult(STRAGGLERS, Status.OK, found, numbers=numbers)


def _latency(size: int, bench: Bench) -> float:
    """Return the median time of an all-reduce of so many bytes, in seconds."""
    values = torch.zeros(size // 4, device=bench.device)

    def once() -> None:
        dist.all_reduce(values)
        _finish(bench)

    once()
    repetitions = _agree_on_repetitions(once, SECONDS_PER_SIZE, bench)
    return median(_timed(once) for _ in range(min(repetitions, MOST_REPETITIONS)))


def _compute(bench: Bench) -> dict[str, float]:
    """Time a fixed computation, and the wait for the others after it: medians in seconds."""
    size = 192 if bench.device.type == "cpu" else 2_048
    factor = torch.full((size, size), 1e-3, device=bench.device)
    token = torch.zeros(1, device=bench.device)

    def multiply() -> None:
        torch.mm(factor, factor)
        _finish(bench)

    for _ in range(3):
        multiply()
    number = _agree_on_repetitions(multiply, SECONDS_PER_ROUND, bench)

    def work() -> None:
        for _ in range(number):
            torch.mm(factor, factor)
        _finish(bench)

    def meet() -> None:
        dist.all_reduce(token)
        _finish(bench)

    rounds = [(_timed(work), _timed(meet)) for _ in range(ROUNDS)]
    return {
        "compute": median(working for working, _ in rounds),
        "waiting": median(waiting for _, waiting in rounds),
    }


def _agree_on_repetitions(work: Callable[[], None], seconds: float, bench: Bench) -> int:
    """Return how often work fits into a time on the slowest worker: the same number on all."""
    taken = torch.tensor([_timed(work)], device=bench.device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return max(3, min(10_000, int(seconds / max(taken.item(), 1e-7))))


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _finish(bench: Bench) -> None:
    if bench.device.type != "cpu":
        torch.accelerator.synchronize(bench.device)


def _load() -> tuple[float | None, int]:
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        return os.getloadavg()[0], cores
    except (AttributeError, OSError):
        return None, cores


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def _rate(bytes_per_second: float) -> str:
    value = bytes_per_second / 1e6
    unit = "MB/s"
    if value >= 1e3:
        value = value / 1e3
        unit = "GB/s"
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"


STAGE = Stage("speed", look, judge, together=True)

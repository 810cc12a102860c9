"""Whether collectives return what they should, and the same bits each time; how fast ranks are.

Patterns of small integers have known results: sums of integers up to 256 are exact in fp32, bf16
and fp16, in whatever order they are added, so any other result is wrong. Sums of ill-conditioned
numbers are repeated, and held against float64.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankscope.bus.replicas import minority_ranks
from rankscope.bus.words import first_of, name_ranks
from rankscope.stats.rounding import UNIT_ROUNDOFF
from rankscope.tools.doctor.stage import Bench, CheckResult, Facts, PreflightStage, Status

SIZES = (1, 1_023, 65_537, 250_000)
LARGEST_IN_ALL = 4_000_000  # elements over all workers that an operation moves at most
EXACT_IN_BF16 = 256

REPETITIONS = 10
REPEATED_SIZE = 65_536

ROUNDOFF = {"fp32": UNIT_ROUNDOFF["float32"], "bf16": UNIT_ROUNDOFF["bfloat16"]}
"""Largest relative error of one rounding."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_UNSUPPORTED = ("not support", "unsupported", "not implemented", "invalid scalar type")


def look(bench: Bench) -> Facts:
    """Run every operation in every type and size, and compare on this worker."""
    cases: list[dict[str, Any]] = []
    unsupported: list[str] = []
    pattern = Pattern(bench.place.num_ranks)
    for dtype in DTYPES:
        for name, operation in _OPERATIONS.items():
            try:
                cases += [_case(name, dtype, *pair) for pair in operation(dtype, bench, pattern)]
            except (RuntimeError, NotImplementedError, TypeError) as error:
                if not any(sign in str(error).lower() for sign in _UNSUPPORTED):
                    raise
                unsupported.append(f"{name} {dtype}")
    return {"cases": cases, "unsupported": unsupported}


def _judge_results(facts: Sequence[Facts]) -> CheckResult:
    """Name operations that were wrong, or differed between workers."""
    wrong: dict[str, list[int]] = {}
    unlike: dict[str, tuple[int, ...]] = {}
    for index, case in enumerate(facts[0]["cases"]):
        name = str(case["name"])
        seen = [fact["cases"][index] for fact in facts]
        bad = [rank for rank, one in enumerate(seen) if one["wrong"]]
        if bad:
            wrong[f"{name}: {seen[bad[0]]['example']}"] = bad
        elif case["same"] and minority_ranks([one["digest"] for one in seen]):
            unlike[name] = minority_ranks([one["digest"] for one in seen])
    unsupported = [str(name) for name in facts[0]["unsupported"]]
    numbers = {"cases": len(facts[0]["cases"]), "wrong": wrong, "unsupported": unsupported}
    if wrong or unlike:
        problems = [f"{name_ranks(ranks)}, {name}" for name, ranks in wrong.items()]
        problems += [f"{name_ranks(ranks)}, {name}: other bits" for name, ranks in unlike.items()]
        return CheckResult(
            Status.ERROR,
            first_of(problems, between="; "),
            "Do not train on this: every gradient passes through these operations. Update or "
            "replace driver, communication library and network card of these ranks' hosts.",
            numbers,
            ranks=tuple(
                sorted({r for group in [*wrong.values(), *unlike.values()] for r in group})
            ),
        )
    left_out = f"; not supported here: {', '.join(unsupported)}" if unsupported else ""
    found = f"{len(facts[0]['cases'])} results exact, with the same bits on all ranks{left_out}"
    return CheckResult(Status.OK, found, numbers=numbers)


def _digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's bytes, made on the host by nothing that is tested here."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=8).hexdigest()


class Pattern:
    """Integers that differ by worker and position, whose sum over W workers is at most 256."""

    def __init__(self, num_ranks: int) -> None:
        few = num_ranks <= EXACT_IN_BF16
        period = EXACT_IN_BF16 // num_ranks + 1 if few else -(-num_ranks // EXACT_IN_BF16)
        steps = torch.arange(period)
        self._values = steps if few else (steps == 0).to(torch.int64)
        shifts = torch.arange(num_ranks)[:, None]
        self._sums = self._values[(steps + shifts) % period].sum(0)

    def of_rank(self, rank: int, size: int) -> Tensor:
        """Return a worker's integers, int64 ``[size]``."""
        return self._values[(self._phase(size) + rank) % len(self._values)]

    def total(self, size: int) -> Tensor:
        """Return their sum over workers, int64 ``[size]``."""
        return self._sums[self._phase(size)]

    def _phase(self, size: int) -> Tensor:
        return (torch.arange(size) * 2_654_435_761 >> 16) % len(self._values)


Outcome = tuple[Tensor, Tensor, bool]
"""The result, the expected one (int64), and whether all workers must have the same."""


def _sizes(parts: int) -> list[int]:
    return sorted({min(size, max(1, LARGEST_IN_ALL // parts**2)) for size in SIZES})


def _all_reduce(dtype: str, bench: Bench, pattern: Pattern) -> Iterator[Outcome]:
    for size in SIZES:
        values = _made(pattern, size, dtype, bench)
        dist.all_reduce(values)
        yield values, pattern.total(size), True


def _broadcast(dtype: str, bench: Bench, pattern: Pattern) -> Iterator[Outcome]:
    last = bench.place.num_ranks - 1
    for size in SIZES:
        values = _made(pattern, size, dtype, bench)
        dist.broadcast(values, last)
        yield values, pattern.of_rank(last, size), True


def _all_gather(dtype: str, bench: Bench, pattern: Pattern) -> Iterator[Outcome]:
    num_ranks = bench.place.num_ranks
    for size in _sizes(num_ranks):
        values = _made(pattern, size, dtype, bench)
        parts = [torch.empty_like(values) for _ in range(num_ranks)]
        dist.all_gather(parts, values)
        expected = torch.cat([pattern.of_rank(other, size) for other in range(num_ranks)])
        yield torch.cat(parts), expected, True


def _reduce_scatter(dtype: str, bench: Bench, pattern: Pattern) -> Iterator[Outcome]:
    rank = bench.place.rank
    num_ranks = bench.place.num_ranks
    for size in _sizes(num_ranks):
        values = _made(pattern, size * num_ranks, dtype, bench)
        part = torch.empty(size, dtype=values.dtype, device=values.device)
        dist.reduce_scatter(part, list(values.chunk(num_ranks)))
        yield part, pattern.total(size * num_ranks).chunk(num_ranks)[rank], False


_OPERATIONS: dict[str, Callable[[str, Bench, Pattern], Iterator[Outcome]]] = {
    "all-reduce": _all_reduce,
    "broadcast": _broadcast,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
}


def _made(pattern: Pattern, size: int, dtype: str, bench: Bench) -> Tensor:
    return pattern.of_rank(bench.place.rank, size).to(DTYPES[dtype]).to(bench.device)


def _case(operation: str, dtype: str, came: Tensor, expected: Tensor, same: bool) -> dict[str, Any]:
    values = came.cpu().to(torch.float64)
    wrong = torch.nonzero(values != expected.to(torch.float64)).reshape(-1)
    example = ""
    if len(wrong):
        at = int(wrong[0])
        example = (
            f"{len(wrong):,} of {len(values):,} numbers wrong, number {at:,} is "
            f"{float(values[at]):g} and not {int(expected[at])}"
        )
    name = f"{operation} {dtype} of {len(values):,}"
    return {
        "name": name,
        "wrong": len(wrong),
        "example": example,
        "digest": _digest(came),
        "same": same,
    }


def repeat(bench: Bench) -> Facts:
    """Sum ill-conditioned numbers ten times, in both types."""
    return {dtype: _repeat(dtype, bench) for dtype in ROUNDOFF}


def _judge_repeats(facts: Sequence[Facts]) -> CheckResult:
    """Report whether sums repeat, agree between workers, and are as exact as their type allows."""
    num_ranks = len(facts)
    errors = {dtype: max(float(fact[dtype]["error"]) for fact in facts) for dtype in ROUNDOFF}
    numbers: dict[str, Any] = {
        dtype: {
            "relative_error": errors[dtype],
            "bound": _bound(dtype, num_ranks),
            "different_results": max(len(set(fact[dtype]["digests"])) for fact in facts),
        }
        for dtype in ROUNDOFF
    }
    exactness = "relative error " + ", ".join(f"{errors[d]:.1g} in {d}" for d in ROUNDOFF)
    for dtype in ROUNDOFF:
        odd = minority_ranks([tuple(fact[dtype]["digests"]) for fact in facts])
        if odd:
            found = f"the same all-reduce in {dtype} gave other bits on {name_ranks(odd)}"
            advice = (
                "Ranks that add different gradients drift apart: check driver and communication "
                "library of these ranks' hosts."
            )
            return CheckResult(Status.ERROR, found, advice, numbers, odd)
        if not errors[dtype] <= _bound(dtype, num_ranks):
            found = (
                f"sums in {dtype} are off by {errors[dtype]:.1e} of their terms, more than "
                f"rounding explains ({_bound(dtype, num_ranks):.1e})"
            )
            advice = "Do not train on this: check driver, communication library and network."
            return CheckResult(Status.ERROR, found, advice, numbers)
    varying = [dtype for dtype in ROUNDOFF if numbers[dtype]["different_results"] > 1]
    if varying:
        found = f"the same numbers gave different bits from time to time in {' and '.join(varying)}"
        advice = (
            "Two runs of the same training will differ. Fix the communication library's algorithm "
            "and protocol if runs must repeat (for NCCL: NCCL_ALGO and NCCL_PROTO)."
        )
        return CheckResult(Status.WARNING, found, advice, numbers)
    found = f"{REPETITIONS} all-reduces alike in {' and '.join(ROUNDOFF)}; {exactness}"
    return CheckResult(Status.OK, found, numbers=numbers)


def _bound(dtype: str, num_ranks: int) -> float:
    """Return the largest error of a sum, in terms of the sum of the terms' sizes, in any order."""
    return (1 + ROUNDOFF[dtype]) ** (num_ranks - 1) - 1


def _repeat(dtype: str, bench: Bench) -> dict[str, Any]:
    terms = ill_conditioned(bench.place.num_ranks, DTYPES[dtype])
    mine = terms[bench.place.rank].to(bench.device)
    results = []
    for _ in range(REPETITIONS):
        values = mine.clone()
        dist.all_reduce(values)
        results.append(values)
    exact = terms.to(torch.float64)
    error = (results[0].cpu().to(torch.float64) - exact.sum(0)).abs() / exact.abs().sum(0)
    return {
        "digests": [_digest(result) for result in results],
        "error": float(error.max()),
    }


def ill_conditioned(num_ranks: int, dtype: torch.dtype) -> Tensor:
    """Return numbers of many sizes whose sums over workers nearly cancel, ``[W, n]``."""
    size = min(REPEATED_SIZE, max(1, LARGEST_IN_ALL // num_ranks))
    generator = torch.Generator().manual_seed(20)
    sizes = 10 ** (6 * torch.rand(num_ranks, size, generator=generator, dtype=torch.float64) - 3)
    terms = sizes * torch.randn(num_ranks, size, generator=generator, dtype=torch.float64)
    if num_ranks > 1:
        terms[-1] = -terms[:-1].sum(0) + 1e-3 * terms[-1]
    return terms.to(dtype)


STAGE = PreflightStage(
    "collectives",
    look,
    {"collectives": _judge_results},
    together=True,
    advice="The backend failed in a plain collective: see its message and the rank's log.",
)
REPEATED_STAGE = PreflightStage(
    "repeatability", repeat, {"repeatability": _judge_repeats}, together=True
)


AMOUNTS = {"1 KB": 1_000, "1 MB": 1_000_000, "25 MB": 25_000_000}
SECONDS_PER_SIZE = 0.4
MOST_REPETITIONS = 50

ROUNDS = 10
SECONDS_PER_ROUND = 0.03
SLOW = 1.3  # times the median from which a rank is named
BUSY = 1.5  # running processes per core from which a host's load is mentioned


def look_at_speed(bench: Bench) -> Facts:
    """Time the all-reduce in three sizes, then a fixed computation on each worker."""
    load, cores = _load()
    return {
        "latency": {name: _latency(size, bench) for name, size in AMOUNTS.items()},
        **_compute(bench),
        "load": load,
        "cores": cores,
    }


def _judge_bandwidth(facts: Sequence[Facts]) -> CheckResult:
    seconds = {name: max(float(fact["latency"][name]) for fact in facts) for name in AMOUNTS}
    rates = {name: AMOUNTS[name] / max(seconds[name], 1e-9) for name in AMOUNTS}
    numbers = {
        name: {"seconds": seconds[name], "bytes_per_second": rates[name]} for name in AMOUNTS
    }
    if len(facts) == 1:
        found = "one rank has nobody to talk to"
        return CheckResult(Status.SKIPPED, found)
    parts = (f"{name} {_duration(seconds[name])} ({_rate(rates[name])})" for name in AMOUNTS)
    return CheckResult(Status.OK, ", ".join(parts), numbers=numbers)


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
        slowest = first_of([f"rank {rank} {seconds[rank] / usual:.1f} ×" for rank in by_size], 6)
        return CheckResult(
            Status.NOTE,
            f"slower than the median at the same computation: {slowest}{load}",
            "All ranks wait for the slowest in each step. Look for other processes, heat or "
            "power limits, or another kind of device at these ranks; repeat the preflight.",
            numbers,
            slow,
        )
    factor = max(seconds) / usual if usual else 1.0
    found = f"the slowest takes {factor:.2f} × the median{load}"
    return CheckResult(Status.OK, found, numbers=numbers)


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


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def _rate(bytes_per_second: float) -> str:
    value = bytes_per_second / 1e6
    unit = "MB/s"
    if value >= 1e3:
        value = value / 1e3
        unit = "GB/s"
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"


SPEED_STAGE = PreflightStage(
    "speed",
    look_at_speed,
    {"bandwidth": _judge_bandwidth, "stragglers": _judge_stragglers},
    together=True,
)

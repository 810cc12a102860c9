"""Whether the same sum has the same bits each time, and how far it is from float64."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankscope.diagnose.rules import name_ranks
from rankscope.doctor.collectives import digest
from rankscope.doctor.result import CheckResult, Facts, Status, unlike_most
from rankscope.doctor.stage import Bench, Stage

NAME, TITLE = "repeatability", "Repeated sums"

REPETITIONS = 10
SIZE = 65_536
LARGEST_IN_ALL = 4_000_000
"""Elements over all workers; each worker makes the data of all."""

ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8}
"""Largest relative error of one rounding."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def look(bench: Bench) -> Facts:
    """Sum ill-conditioned numbers ten times, in both types."""
    return {dtype: _repeat(dtype, bench) for dtype in DTYPES}


def judge(facts: Sequence[Facts]) -> list[CheckResult]:
    """Say whether sums repeat, agree between workers, and are as exact as their type allows."""
    num_ranks = len(facts)
    errors = {dtype: max(float(fact[dtype]["error"]) for fact in facts) for dtype in DTYPES}
    numbers: dict[str, Any] = {
        dtype: {
            "relative_error": errors[dtype],
            "bound": _bound(dtype, num_ranks),
            "different_results": max(len(set(fact[dtype]["digests"])) for fact in facts),
        }
        for dtype in DTYPES
    }
    exactness = "relative error " + ", ".join(f"{errors[d]:.1g} in {d}" for d in DTYPES)
    for dtype in DTYPES:
        odd = unlike_most([tuple(fact[dtype]["digests"]) for fact in facts])
        if odd:
            found = f"the same all-reduce in {dtype} gave other bits on {name_ranks(odd)}"
            advice = (
                "Ranks that add different gradients drift apart: check driver and communication "
                "library of these ranks' hosts."
            )
            return [CheckResult(NAME, TITLE, Status.ERROR, found, advice, numbers, odd)]
        if not errors[dtype] <= _bound(dtype, num_ranks):
            found = (
                f"sums in {dtype} are off by {errors[dtype]:.1e} of their terms, more than "
                f"rounding explains ({_bound(dtype, num_ranks):.1e})"
            )
            advice = "Do not train on this: check driver, communication library and network."
            return [CheckResult(NAME, TITLE, Status.ERROR, found, advice, numbers)]
    varying = [dtype for dtype in DTYPES if numbers[dtype]["different_results"] > 1]
    if varying:
        found = f"the same numbers gave different bits from time to time in {' and '.join(varying)}"
        advice = (
            "Two runs of the same training will differ. Fix the communication library's algorithm "
            "and protocol if runs must repeat (for NCCL: NCCL_ALGO and NCCL_PROTO)."
        )
        return [CheckResult(NAME, TITLE, Status.WARNING, found, advice, numbers)]
    found = f"{REPETITIONS} all-reduces alike in {' and '.join(DTYPES)}; {exactness}"
    return [CheckResult(NAME, TITLE, Status.OK, found, numbers=numbers)]


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
    return {"digests": [digest(result) for result in results], "error": float(error.max())}


def ill_conditioned(num_ranks: int, dtype: torch.dtype) -> Tensor:
    """Return numbers of many sizes whose sums over workers nearly cancel, ``[W, n]``.

    Every worker makes the same ones; no common random generator is touched.
    """
    size = min(SIZE, max(1, LARGEST_IN_ALL // num_ranks))
    generator = torch.Generator().manual_seed(20)
    sizes = 10 ** (6 * torch.rand(num_ranks, size, generator=generator, dtype=torch.float64) - 3)
    terms = sizes * torch.randn(num_ranks, size, generator=generator, dtype=torch.float64)
    if num_ranks > 1:
        terms[-1] = -terms[:-1].sum(0) + 1e-3 * terms[-1]
    return terms.to(dtype)


STAGE = Stage(NAME, TITLE, look, judge, together=True)

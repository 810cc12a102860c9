"""The audit of reductions: how exact it is, its floor, and what it can see.

Run ``python benchmarks/audit.py``; the tables stand in docs/audit.md. Parts of it:
``--parts exact,floor,flips,limits`` are measured in this process, with the sketches, the sections
and the detector of the product; ``--parts real`` reduces on real ranks, ``--parts healthy`` trains
healthy jobs on real ranks with ``watch`` (benchmarks/audit_runs.py).
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import audit_runs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankscope.bus.groups import Groups, cut_sections, group_parameters
from rankscope.bus.step import GatheredStep, StepReport
from rankscope.bus.steps import StepBatch
from rankscope.evidence.reduction.audit import ReductionAudit
from rankscope.evidence.reduction.levels import ExpectedResiduals
from rankscope.gradients.kernels.interface import period_signs
from rankscope.gradients.kernels.plain import PlainKernel
from rankscope.gradients.sketch import Sketcher
from rankscope.gradients.totals import GradientTotals, fold
from rankscope.lab.study.rounding import record_gradients
from rankscope.stats.audit import AUDIT_WIDTH, AuditPart, residuals, total_of

Row = dict[str, Any]
Parameters = dict[str, Tensor]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
CPU = torch.device("cpu")


class Audit:
    """Audits reductions of some parameters as ``watch`` does, without ranks.

    Args:
        sizes: Elements of each parameter.
        groups: Which group each belongs to.
        section: Elements in a section, at most.
        plain: Whether plain torch measures, as where there is no C compiler.
    """

    def __init__(
        self, sizes: dict[str, int], groups: Groups, section: int = 10_000_000, plain: bool = False
    ) -> None:
        self.sections = cut_sections(sizes, groups, section_elements=section)
        self._sketcher = Sketcher(CPU, groups, sections=self.sections)
        if plain:
            self._sketcher._kernel = PlainKernel(CPU, self._sketcher.width, period_signs(0))
        self.kernel = self._sketcher.kernel

    def measure(self, gradients: Parameters) -> GradientTotals:
        """Measure one gradient."""
        totals = self._sketcher.new_totals()
        for name, gradient in gradients.items():
            self._sketcher.measure(name, gradient, totals)
        return totals

    def compare(self, local: list[GradientTotals], reduced: GradientTotals) -> NDArray[np.float64]:
        """Return the residual of all, then of each group, as every worker would learn it."""
        parts = [self._part(totals, reduced) for totals in local]
        width = len(parts)
        total = total_of(parts, width, width)
        return residuals(
            total,
            parts[0],
            np.searchsorted(self.sections.group_of, range(len(self.sections.groups))),
            width,
            width,
        )

    def _part(self, local: GradientTotals, reduced: GradientTotals) -> AuditPart:
        narrow = [
            fold(one.sketches.double(), AUDIT_WIDTH).float().numpy() for one in (local, reduced)
        ]
        return AuditPart(narrow[0], narrow[1], reduced.squared_norms.numpy())


def reduce_sequentially(gradients: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the mean, added up in rank order in a type, in that type."""
    total = gradients[0].to(dtype)
    for gradient in gradients[1:]:
        total = total + gradient.to(dtype)
    return total / len(gradients)


def reduce_in_ring(gradients: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the mean as a ring adds it up: each W-th of the buffer begins at another rank."""
    width = len(gradients)
    pieces = [gradient.tensor_split(width) for gradient in gradients]
    sums = []
    for first in range(width):
        order = [pieces[(first + i) % width][first] for i in range(width)]
        sums.append(reduce_sequentially(order, dtype))
    return torch.cat(sums)


ORDERS: dict[str, Callable[[list[Tensor], torch.dtype], Tensor]] = {
    "rank order": reduce_sequentially,
    "ring": reduce_in_ring,
}


def measure_exactness(recorded: dict[int, dict[str, NDArray[np.float32]]]) -> Iterator[Row]:
    """Compare residuals with true relative errors, on gradients of a language model."""
    for width, arrays in recorded.items():
        groups = group_parameters(list(arrays))
        audit = Audit({name: array.shape[1] for name, array in arrays.items()}, groups)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        local = [
            audit.measure({name: rows[rank] for name, rows in tensors.items()})
            for rank in range(width)
        ]
        for dtype, order in product(("bfloat16", "float16", "float32"), ORDERS):
            reduced = {
                name: ORDERS[order](list(rows), DTYPES[dtype]) for name, rows in tensors.items()
            }
            found = audit.compare(local, audit.measure(reduced))[1:]
            for group, residual in zip(groups.names, found.tolist(), strict=True):
                members = [name for name in arrays if groups.names[groups.index_of[name]] == group]
                true = true_error([tensors[n] for n in members], [reduced[n] for n in members])
                yield {
                    "workers": width,
                    "dtype": dtype,
                    "order": order,
                    "group": group,
                    "true": true,
                    "residual": residual,
                    "ratio": residual / true,
                }


def true_error(local: list[Tensor], reduced: list[Tensor]) -> float:
    """Return the relative distance of reduced gradients from the means, in float64."""
    means = torch.cat([rows.double().mean(0).flatten() for rows in local])
    ours = torch.cat([one.double().flatten() for one in reduced])
    return float((ours - means).norm() / means.norm())


def draw(kind: str, size: int, pool: NDArray[np.float32], rng: np.random.Generator) -> Tensor:
    """Return a made-up gradient: normal, or drawn from the elements of a real one."""
    if kind == "normal":
        return torch.from_numpy(rng.standard_normal(size, np.float32))
    return torch.from_numpy(pool[rng.integers(len(pool), size=size)])


def measure_floor(sizes: list[int], pool: NDArray[np.float32]) -> Iterator[Row]:
    """Return the residual of fp32 sums of two workers, whole and in sections of 10 M."""
    for size, kind, plain in product(sizes, ("normal", "drawn from real"), (False, True)):
        rng = np.random.default_rng(size)
        groups = group_parameters(["a.weight"])
        audits = {"whole": Audit({"a.weight": size}, groups, section=size, plain=plain)}
        if size > 10_000_000:
            audits["cut"] = Audit({"a.weight": size}, groups, plain=plain)
        gradients = [draw(kind, size, pool, rng) for _ in range(2)]
        totals = {
            name: [audit.measure({"a.weight": g}) for g in gradients]
            for name, audit in audits.items()
        }
        mean = gradients[0].add_(gradients[1]).div_(2)
        row: Row = {"size": size, "kind": kind, "kernel": audits["whole"].kernel}
        for name, audit in audits.items():
            found = audit.compare(totals[name], audit.measure({"a.weight": mean}))
            row[name] = float(found[1])
        yield row


@dataclass
class Watched:
    """One group's reductions as the detector sees them, after some healthy steps.

    Attributes:
        norms_W1: Norms of the local gradients.
        dtype: Type of the reduction, which is the one that is meant.
        healthy: Residual of a healthy step.
    """

    norms_W1: NDArray[np.float64]
    dtype: str
    healthy: float

    def __post_init__(self) -> None:
        self._before = ReductionAudit(len(self.norms_W1), {"a": self.dtype, "b": self.dtype})
        for _ in range(4):
            self._show(self._before, self.healthy)
        self._state = self._before.state()

    def finds(self, residual: float) -> bool:
        """Return whether a step with such a residual is told as a corrupted element, at once."""
        detector = ReductionAudit(len(self.norms_W1), {"a": self.dtype, "b": self.dtype})
        detector.restore(self._state)
        return self._show(detector, residual)

    def _show(self, detector: ReductionAudit, residual: float) -> bool:
        width = len(self.norms_W1)
        workers: Any = {"grad_max": np.ones(width), "grad_scale": np.ones(width)}
        step = GatheredStep(
            step=5,
            time=0.0,
            observed=True,
            workers=workers,
            sketches_WK=None,
            samples=(np.empty(0, np.int64),) * width,
            groups=("a", "b"),
            group_norms_WG=np.tile(self.norms_W1, (1, 2)),
            residuals_WG=np.tile([residual, self.healthy], (width, 1)),
        )
        cosines_WG = np.zeros((width, 2))
        report = StepReport(step, {}, group_cosine_rest_WG=cosines_WG)
        found = [one for told in detector.observe(StepBatch([report])) for one in told]
        return any(one.key == "reduction-spike" for one in found)


def measure_flips(
    sizes: list[int], trials: int, pool: NDArray[np.float32], width: int
) -> Iterator[Row]:
    """Return the share of flips that are found in the same step, by bit."""
    for size, kind, dtype in product(sizes, ("normal", "drawn from real"), DTYPES):
        rng = np.random.default_rng([size, width])
        groups = group_parameters(["a.weight"])
        audit = Audit({"a.weight": size}, groups)
        total, local = torch.zeros(size, dtype=DTYPES[dtype]), []
        norms = []
        for _ in range(width):
            gradient = draw(kind, size, pool, rng)
            if kind != "normal":  # workers agree in sign no more than by chance
                gradient *= torch.from_numpy(rng.choice(np.array([-1, 1], np.float32), size))
            gradient = gradient.to(DTYPES[dtype])
            local.append(audit.measure({"a.weight": gradient}))
            norms.append(float(local[-1].squared_norms.sum()) ** 0.5)
            total = total + gradient
        total = total / width
        healthy = float(audit.compare(local, audit.measure({"a.weight": total}))[1])
        watched = Watched(np.array(norms)[:, None], dtype, healthy)
        magnitudes = total.abs().float()
        count = max(size // 100, 1)
        largest = torch.topk(magnitudes, count).indices
        chosen = [int(largest[-1])] + [
            int(largest[i]) for i in rng.integers(count, size=trials - 1)
        ]
        for bit in _bits(dtype):
            found = [_flip_found(audit, local, total, at, bit, watched) for at in chosen]
            yield {
                "workers": width,
                "size": size,
                "kind": kind,
                "dtype": dtype,
                "bit": bit,
                "healthy": healthy,
                "found": sum(found),
                "smallest_found": found[0],
                "trials": len(found),
            }


def _flip_found(
    audit: Audit,
    local: list[GradientTotals],
    total: Tensor,
    at: int,
    bit: int,
    watched: Watched,
) -> bool:
    words = total.view(WORDS[total.dtype])
    before = words[at].clone()
    words[at] ^= 1 << bit
    residual = float(audit.compare(local, audit.measure({"a.weight": total}))[1])
    words[at] = before
    return watched.finds(residual)


def measure_limits(sizes: list[int]) -> Iterator[Row]:
    """Return the smallest change that is told, from the limits that the detector holds."""
    for dtype, width in product(DTYPES, (2, 8, 64)):
        expected = ExpectedResiduals(width, {"a": dtype})
        ones = np.ones(1)
        limit = float(expected.limits(("a",), ones, 1e6 * ones)[0][0])
        yield {
            "dtype": dtype,
            "workers": width,
            "limit": limit,
            **{f"{size:,}": limit * size**0.5 for size in sizes},
        }


def _bits(dtype: str) -> range:
    return range(10, 31) if dtype == "float32" else range(15)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="exact,floor,flips,limits,real,healthy")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000_000, 4_000_000, 10_000_000])
    parser.add_argument("--floor-sizes", type=int, nargs="+", default=[40_000_000, 200_000_000])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--workers", type=int, default=4, help="for the flips")
    parser.add_argument("--steps", type=int, default=1500, help="of each healthy job")
    parser.add_argument("--modes", default=",".join(audit_runs.MODES), help="healthy jobs")
    parser.add_argument("--output", type=Path, help="a JSON file that gets the rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = options.parts.split(",")
    rows: dict[str, list[Row]] = {}
    recorded: dict[int, dict[str, NDArray[np.float32]]] = {}
    if {"exact", "floor", "flips"} & set(parts):
        eight = dict(record_gradients(8, step=3, base_steps=60).arrays)
        recorded = {w: {name: rows[:w] for name, rows in eight.items()} for w in (2, 4, 8)}
        pool = np.concatenate([rows[0] for rows in eight.values()])
    measures: dict[str, Callable[[], Iterator[Row]]] = {
        "exact": lambda: measure_exactness(recorded),
        "floor": lambda: measure_floor([*options.sizes, *options.floor_sizes], pool),
        "flips": lambda: measure_flips(options.sizes, options.trials, pool, options.workers),
        "limits": lambda: measure_limits(options.sizes),
        "real": audit_runs.measure_real,
        "healthy": lambda: audit_runs.measure_healthy(options.steps, options.modes.split(",")),
    }
    for part in parts:
        started = time.perf_counter()
        rows[part] = []
        for row in measures[part]():
            rows[part].append(row)
            if part != "healthy":  # they say so themselves, as they end
                print(json.dumps(row), flush=True)
        print(f"# {part}: {time.perf_counter() - started:.0f} s", flush=True)
        if options.output:
            options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

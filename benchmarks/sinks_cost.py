"""What a step costs the root agent when there are sinks, and what it costs a sink's own.

    python benchmarks/sinks_cost.py

The first column is all that one step costs whatever the number of sinks, and however slow they
are; the second what each tracker's thread then spends on names. Neither is in the training's
thread.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from rankscope.bus.evidence import DType, Source, Table
from rankscope.bus.step import GatheredStep, StepReport
from rankscope.evidence import columns_of
from rankscope.sinks.base import step_values

REPEATS = 300
NUMPY: dict[DType, type[np.generic]] = {
    DType.INT: np.int64,
    DType.FLOAT: np.float64,
    DType.BOOL: np.bool_,
}


def make_report(num_workers: int) -> StepReport:
    """Return a step in which every column has a value."""
    rng = np.random.default_rng(0)

    def column(dtype: DType) -> Any:
        return (100 * rng.random(num_workers)).astype(NUMPY[dtype])

    local = {s.name: column(s.dtype) for s in columns_of(Table.WORKERS, Source.LOCAL)}
    gathered = GatheredStep(
        step=0,
        time=0.0,
        observed=True,
        workers=local,
        sketches_WK=None,
        samples=(np.empty(0, np.int64),) * num_workers,
    )
    values = {s.name: 1.0 for s in columns_of(Table.STEPS, Source.DERIVED)}
    derived = {s.name: rng.random(num_workers) for s in columns_of(Table.WORKERS, Source.DERIVED)}
    return StepReport(gathered, values, derived)


def median_microseconds(work: Callable[[], Any]) -> float:
    """Return the median time of a call."""
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return 1e6 * float(np.median(seconds))


def main() -> None:
    """Print a table by number of workers."""
    print("| workers | handing a step over, µs | naming its numbers, µs |")
    print("|---|---|---|")
    for num_workers in (8, 64, 1024):
        report = make_report(num_workers)
        values = step_values(report, range(16))
        hand = median_microseconds(partial(step_values, report, range(16)))
        name = median_microseconds(values.flat)
        print(f"| {num_workers:,} | {hand:.0f} | {name:.0f} |")


if __name__ == "__main__":
    main()

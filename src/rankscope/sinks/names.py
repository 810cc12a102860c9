"""Names of the numbers that sinks get, all derived from the signal registry.

======================================  =======================================================
``rankscope/<column>``                  a column of the steps table
``rankscope/findings_<severity>``       open findings of that severity
``rankscope_workers/<column>/<which>``  ``min``, ``mean`` or ``max`` over the workers
``rankscope_ranks/<column>/<rank>``     the value of a worker that a finding has named
======================================  =======================================================
"""

from rankscope.core.finding import Severity
from rankscope.core.signals import DType, Signal, Table, Tail, signals

_NUMBERS = (DType.INT, DType.FLOAT, DType.BOOL)

STEP_SIGNALS: tuple[Signal, ...] = tuple(
    s for s in signals(Table.STEPS) if s.dtype in _NUMBERS and s.name not in ("step", "time")
)
"""Columns of the steps table that are shown: all numbers but the two that are an axis."""

WORKER_SIGNALS: tuple[Signal, ...] = tuple(
    s for s in signals(Table.WORKERS) if s.dtype in _NUMBERS and s.tail is not Tail.NONE
)
"""Columns of the workers table that are shown: those in which a worker can stand out."""

SPREAD = ("min", "mean", "max")


def step_name(column: str) -> str:
    """Return the name of a column of the steps table."""
    return f"rankscope/{column}"


def findings_name(severity: Severity) -> str:
    """Return the name of the number of open findings of one severity."""
    return f"rankscope/findings_{severity}"


def spread_name(column: str, which: str) -> str:
    """Return the name of the smallest, mean or largest value over the workers."""
    return f"rankscope_workers/{column}/{which}"


def rank_name(column: str, rank: int) -> str:
    """Return the name of one worker's value."""
    return f"rankscope_ranks/{column}/{rank}"

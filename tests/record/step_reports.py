"""Step reports by hand, and their rows in a run: each value follows from step, rank and column."""

import numpy as np

from rankscope.bus.evidence import DType, Source, Table
from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.bus.step import GatheredStep, StepReport
from rankscope.evidence import columns_of
from rankscope.stats.arrays import MISSING_INT

GROUPS = ("embedding", "layers.0", "head")
NUMPY = {DType.INT: np.int64, DType.FLOAT: np.float64, DType.BOOL: np.bool_}


def cell(signal, step, rank):
    mark = 31 * step + 7 * rank + len(signal.name)
    if signal.dtype is DType.BOOL:
        return mark % 2 == 0
    if mark % 7 == 0:
        return None
    if signal.dtype is DType.INT:
        return mark * (2**40 + 1) if signal.source is Source.LOCAL else mark
    return mark / 3


def filled(value, dtype):
    if value is not None:
        return value
    return MISSING_INT if dtype is DType.INT else np.nan


def local_values(step, num_workers):
    ranks, columns = range(num_workers), {}
    for s in columns_of(Table.WORKERS, Source.LOCAL):
        values = [filled(cell(s, step, rank), s.dtype) for rank in ranks]
        columns[s.name] = np.array(values, NUMPY[s.dtype])
    return columns


def make_cosines(step, num_workers):
    """Return a symmetric matrix; in steps that 5 divides, the last worker has no direction."""
    cosines_WW = np.tanh(np.random.default_rng(step).normal(size=(num_workers, num_workers)))
    cosines_WW = (cosines_WW + cosines_WW.T) / 2
    np.fill_diagonal(cosines_WW, 1.0)
    if step % 5 == 0:
        cosines_WW[-1] = cosines_WW[:, -1] = np.nan
    return cosines_WW


def make_differences(step, num_workers):
    ranks, no = np.arange(num_workers), np.zeros(num_workers, bool)
    return (
        StateDifference(StateKind.PARAMETER, "head", np.where(ranks == 1, -step, step), no),
        StateDifference(StateKind.REDUCED, "layers.0", 2**62 + ranks, ranks == 0),
    )


def make_report(step, num_workers=4, *, micro=1, observed=True, groups=False, differences=False):
    ranks = range(num_workers)
    norms_WG = np.add.outer(np.arange(num_workers), [10.0, 20.0, 30.0])
    return StepReport(
        GatheredStep(
            step=step,
            time=1_700_000_000.0 + step,
            observed=observed,
            workers=local_values(step, num_workers),
            sketches_WK=None,
            samples=tuple(np.arange(3 * (rank != 1)) + 10 * step + rank for rank in ranks),
            micro_losses=tuple(np.arange(micro) + step + rank / 8 for rank in ranks),
            micro_weights=tuple(np.arange(micro) + 100.0 * rank for rank in ranks),
            micro_norms=tuple(np.arange(micro) + 0.5 * rank for rank in ranks) if observed else (),
            micro_scales=tuple(np.full(micro, 2.0**rank) for rank in ranks),
            differences=make_differences(step, num_workers) if differences else (),
            groups=GROUPS if groups and observed else (),
            group_norms_WG=norms_WG if groups and observed else None,
        ),
        values={
            s.name: float(filled(cell(s, step, 0), DType.FLOAT))
            for s in columns_of(Table.STEPS, Source.DERIVED)
        },
        derived={
            s.name: np.array([filled(cell(s, step, rank), s.dtype) for rank in ranks])
            for s in columns_of(Table.WORKERS, Source.DERIVED)
        },
        cosines_WW=make_cosines(step, num_workers) if observed else None,
        group_cosine_rest_WG=np.tile([0.25, np.nan, 0.75], (num_workers, 1)) if groups else None,
    )


def expected_steps(num_steps):
    return [
        {"step": step, "time": 1_700_000_000.0 + step, "observed": True}
        | {s.name: cell(s, step, 0) for s in columns_of(Table.STEPS, Source.DERIVED)}
        for step in range(num_steps)
    ]


def expected_workers(num_steps, num_workers=4):
    return [
        {"step": step, "rank": rank}
        | {
            s.name: cell(s, step, rank)
            for s in columns_of(Table.WORKERS, Source.LOCAL, Source.DERIVED)
        }
        for step in range(num_steps)
        for rank in range(num_workers)
    ]

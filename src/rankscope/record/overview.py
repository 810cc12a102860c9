"""A signal over a whole run in few bins of steps, at any length of the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope.core.arrays import Floats, Ints
from rankscope.core.rollup import LEVELS, Bins, bin_width, bins_of_steps, joined
from rankscope.core.signals import DType, Table
from rankscope.record.rollups import Cells, read_level
from rankscope.record.schema import schema_with, to_numpy
from rankscope.record.tables import parts_of, read_part, read_tail, step_range

MAX_ROWS = 2**21
"""Rows of the workers table that are read whole; of more, only roll-ups, and the end."""


@dataclass(frozen=True, slots=True)
class Overview:
    """One signal of the workers table over the whole run, in B bins of steps; W workers.

    A bin is some neighbouring steps, a single one in a short run. Values that are not finite
    count as missing.

    Attributes:
        first_B: First step of each bin.
        last_B: Last step of each bin.
        mean_BW: Mean over the bin's steps of each worker, NaN where none has a value.
        low_BW: The smallest of them.
        high_BW: The largest.
    """

    first_B: Ints
    last_B: Ints
    mean_BW: Floats
    low_BW: Floats
    high_BW: Floats


def read_overviews(
    run: Path, names: Sequence[str], num_workers: int, max_bins: int
) -> dict[str, Overview]:
    """Read quantities over a whole run, each file once.

    From the workers table where there are no roll-ups, and where bins are narrower than those of
    the roll-ups, with up to ``MAX_ROWS`` rows. Else from the widest roll-ups that are narrow
    enough, then from narrower ones, and from single steps for what is left at the end.

    Args:
        run: The run directory.
        names: Columns of the workers table, of numbers.
        num_workers: W.
        max_bins: Bins at most; a run of so few steps has a bin for each.

    Raises:
        RunError: A file cannot be read.
    """
    found = step_range(run, Table.WORKERS)
    if found is None:
        return {name: _overview(_nothing(num_workers)) for name in names}
    first, last = found
    num_steps = last - first + 1
    width = bin_width(first, last, max_bins)
    few = num_steps * num_workers <= MAX_ROWS or num_steps <= max_bins
    if few and width < LEVELS[0]:
        bins = bins_of(_all_rows(run, names), names, num_workers)
        return {name: _overview(_thinned(bins[name], max_bins)) for name in names}
    width = max(width, LEVELS[0])
    parts = _rolled(run, names, num_workers, width)
    after = max((int(part[names[0]].last_B.max()) for part in parts), default=first - 1)
    schema = schema_with(Table.WORKERS, ("step", "rank", *names))
    for rows in read_tail(parts_of(run, Table.WORKERS), schema, after + 1):
        tail = bins_of(rows.filter(pc.field("step") > after), names, num_workers)
        parts.append({name: bins.merged(width) for name, bins in tail.items()})
    whole = {name: joined([part[name] for part in parts]).merged(width) for name in names}
    return {name: _overview(_thinned(whole[name], max_bins)) for name in names}


def bins_of(rows: pa.Table, names: Sequence[str], num_workers: int) -> dict[str, Bins]:
    """Return rows of the workers table as bins of one step, by quantity."""
    steps = to_numpy(rows["step"], DType.INT)
    cells = Cells(steps, to_numpy(rows["rank"], DType.INT), num_workers)
    missing = np.float64("nan")
    return {
        name: bins_of_steps(
            cells.steps_B,
            cells.spread(to_numpy(rows[name].cast(pa.float64(), safe=False), DType.FLOAT), missing),
        )
        for name in names
    }


def _all_rows(run: Path, names: Sequence[str]) -> pa.Table:
    schema = schema_with(Table.WORKERS, ("step", "rank", *names))
    parts = [read_part(file, schema) for file in parts_of(run, Table.WORKERS)]
    return pa.concat_tables([schema.empty_table(), *parts])


def _rolled(run: Path, names: Sequence[str], num_workers: int, width: int) -> list[dict[str, Bins]]:
    """Return the bins of the roll-ups, those of the widest level first."""
    parts: list[dict[str, Bins]] = []
    next_step = 0
    for level in sorted(LEVELS, reverse=True):
        part = read_level(run, level, names, num_workers, next_step) if level <= width else None
        if part is not None and len(part[names[0]].last_B):
            parts.append({name: bins.merged(width) for name, bins in part.items()})
            next_step = int(part[names[0]].last_B.max()) + 1
    return parts


def _thinned(bins: Bins, max_bins: int) -> Bins:
    if len(bins.first_B) <= max_bins:
        return bins
    return bins.merged(bin_width(int(bins.first_B[0]), int(bins.first_B[-1]), max_bins))


def _nothing(num_workers: int) -> Bins:
    return bins_of_steps(np.empty(0, np.int64), np.empty((0, num_workers)))


def _overview(bins: Bins) -> Overview:
    return Overview(bins.first_B, bins.last_B, bins.mean_BW, bins.low_BW, bins.high_BW)

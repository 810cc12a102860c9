"""Reading a bounded part of a table, whatever its length: an even choice of rows, or the latest.

Whole row groups are read, and no others; a row group holds whole steps, since a flush writes whole
steps.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rankscope.core.arrays import Ints
from rankscope.record.tables import shaped, unusable

MAX_FILES = 32
"""Files that an even choice of rows is taken from."""

Choice = Callable[[Ints], Ints]
"""From the rows of each row group of a file: the row groups to read."""


def even_rows(files: Sequence[Path], schema: pa.Schema, max_rows: int) -> pa.Table:
    """Return rows of evenly chosen row groups, all rows if there are few enough.

    Args:
        files: The files of a table, in order.
        schema: The columns to return.
        max_rows: About how many rows at most; at least a row group of each file that is opened.

    Raises:
        RunError: A file cannot be read.
    """
    chosen = _evenly(len(files), MAX_FILES)
    share = max_rows // max(len(chosen), 1)

    def choose(sizes_G: Ints) -> Ints:
        if sizes_G.sum() <= share or not len(sizes_G):
            return np.arange(len(sizes_G))
        return _evenly(len(sizes_G), max(1, int(share // sizes_G.mean())))

    parts = [_read_groups(files[index], schema, choose) for index in chosen.tolist()]
    return pa.concat_tables([schema.empty_table(), *parts])


def latest_rows(files: Sequence[Path], schema: pa.Schema, max_rows: int) -> pa.Table:
    """Return the last rows of a table, in whole row groups: at least one.

    Raises:
        RunError: A file cannot be read.
    """
    parts: list[pa.Table] = []
    left = max_rows

    def choose(sizes_G: Ints) -> Ints:
        fits = np.cumsum(sizes_G[::-1]) <= left
        count = max(int(fits.sum()), 0 if parts else 1)
        return np.arange(len(sizes_G) - min(count, len(sizes_G)), len(sizes_G))

    for file in reversed(files):
        part = _read_groups(file, schema, choose)
        if not len(part) and parts:
            break
        parts.insert(0, part)
        left -= len(part)
    return pa.concat_tables([schema.empty_table(), *parts])


def even_single_rows(files: Sequence[Path], schema: pa.Schema, max_rows: int) -> pa.Table:
    """Return so many rows, evenly chosen, the first and the last among them.

    Only the row groups that hold them are read: for tables of one large row per step.

    Raises:
        RunError: A file cannot be read.
    """
    ends = np.cumsum([0, *map(_num_rows, files)])
    wanted = _evenly(int(ends[-1]), max_rows)
    parts = []
    for file, start, end in zip(files, ends[:-1], ends[1:], strict=True):
        rows_R = wanted[(wanted >= start) & (wanted < end)] - start
        if len(rows_R):
            parts.append(_rows_at(file, schema, rows_R))
    return pa.concat_tables([schema.empty_table(), *parts])


def _rows_at(file: Path, schema: pa.Schema, rows_R: Ints) -> pa.Table:
    """Return the rows with these numbers, out of the row groups that the file has by now.

    A flush merges row groups, but never changes the number of a row.
    """
    read = [np.empty(0, np.int64)]

    def choose(sizes_G: Ints) -> Ints:
        ends_G = np.cumsum(sizes_G)
        groups = np.unique(np.searchsorted(ends_G, rows_R, side="right"))
        groups = groups[groups < len(sizes_G)]  # all, unless another file has taken its place
        read.extend(np.arange(ends_G[g] - sizes_G[g], ends_G[g]) for g in groups.tolist())
        return groups

    table = _read_groups(file, schema, choose)
    places = np.concatenate(read)
    return table.take(np.flatnonzero(np.isin(places, rows_R)))


def _evenly(length: int, count: int) -> Ints:
    """Return up to ``count`` indices below ``length``, evenly spaced, first and last included."""
    number = min(length, count)
    return np.unique(np.linspace(0, max(length - 1, 0), number).astype(np.int64))


def _num_rows(file: Path) -> int:
    try:
        with file.open("rb") as handle:
            return int(pq.ParquetFile(handle).metadata.num_rows)
    except (OSError, pa.ArrowException) as error:
        raise unusable(file, error) from error


def _read_groups(file: Path, schema: pa.Schema, choose: Choice) -> pa.Table:
    try:
        with file.open("rb") as handle:
            parquet = pq.ParquetFile(handle)
            names = [name for name in parquet.schema_arrow.names if name in set(schema.names)]
            groups = choose(_sizes(parquet.metadata)).tolist()
            rows = parquet.read_row_groups(groups, columns=names)
        return shaped(rows, schema)
    except (OSError, pa.ArrowException) as error:
        raise unusable(file, error) from error


def _sizes(footer: Any) -> Ints:
    sizes = [footer.row_group(g).num_rows for g in range(footer.num_row_groups)]
    return np.array(sizes, np.int64)

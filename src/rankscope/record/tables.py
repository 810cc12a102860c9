"""The Parquet files of a run's tables, read file by file.

Whole row groups are read, and no others; a row group holds whole steps, since a flush writes whole
steps. So a bounded part of a table can be read whatever its length: an even choice of rows, or the
latest.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rankscope.core.arrays import Ints
from rankscope.core.finding import MAX_WORKERS
from rankscope.core.signals import Table, signal
from rankscope.errors import RunError
from rankscope.record.files import open_file, unreadable
from rankscope.record.schema import Array, arrow_schema, to_numpy

Columns = dict[str, Array]

MAX_FILES = 32
"""Files that an even choice of rows is taken from."""


def parts_in(folder: Path) -> list[Path]:
    """Return the Parquet files of a table's directory in order; none when it does not exist.

    Raises:
        RunError: They cannot be listed.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(folder, error) from error
    parts = [name for name in names if name.startswith("part-") and name.endswith(".parquet")]
    return [folder / name for name in parts]


_DAMAGES = (pa.ArrowException, ValueError, KeyError, TypeError, OverflowError)
"""What Arrow raises over a damaged file, or one whose columns are not those of a table."""

Choice = Callable[[Any], Sequence[int]]
"""From the footer of a file: the row groups to read."""


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a part from a single handle.

    Raises:
        RunError: It cannot be read.
    """
    try:
        with open_file(file) as handle:
            yield pq.ParquetFile(handle)
    except RunError:
        raise
    except MemoryError as error:
        raise RunError(
            f"there is not enough memory to read {file}: give the command more; the file is left "
            "as it is"
        ) from error
    except (OSError, *_DAMAGES) as error:
        if isinstance(error, OSError) and error.errno is not None:  # Arrow's own have no number
            raise unreadable(file, error) from error
        raise RunError(f"cannot read {file}: it is damaged; remove it to read the rest") from error


def read_part(file: Path, schema: pa.Schema, choose: Choice | None = None) -> pa.Table:
    """Read one file, shaped as a schema says.

    Args:
        file: A Parquet file.
        schema: The columns to return; those that the file lacks are null.
        choose: The row groups to read; all if omitted.

    Raises:
        RunError: The file cannot be read.
    """
    with _opened(file) as parquet:
        present = [name for name in parquet.schema_arrow.names if name in set(schema.names)]
        groups = range(parquet.num_row_groups) if choose is None else choose(parquet.metadata)
        rows = parquet.read_row_groups([int(g) for g in groups], columns=present)
        columns = [
            rows[field.name].cast(field.type)
            if field.name in present
            else pa.nulls(len(rows), field.type)
            for field in schema
        ]
        table = pa.table(columns, schema=schema)
        _check(table)
        return table


def _check(table: pa.Table) -> None:
    """Raise ValueError where rows have no key, an impossible rank, or text that is not UTF-8."""
    for field, column in zip(table.schema, table.columns, strict=True):
        if not field.nullable and column.null_count:
            raise ValueError(f"rows without {field.name}")
        if field.name == "rank" and len(column):
            ends = pc.min_max(column).as_py()
            if not 0 <= ends["min"] <= ends["max"] < MAX_WORKERS:
                raise ValueError(f"ranks from {ends['min']} to {ends['max']}")
        if pa.types.is_string(field.type):
            column.validate(full=True)


def read_rows(folder: Path, schema: pa.Schema) -> pa.Table:
    """Return all rows of a directory's files in order; none when it does not exist.

    Raises:
        RunError: A file cannot be read.
    """
    parts = [read_part(file, schema) for file in parts_in(folder)]
    return pa.concat_tables([schema.empty_table(), *parts])


def from_step(first_step: int) -> Choice:
    """Return the choice of row groups that may have rows of this step or later ones."""

    def choose(footer: Any) -> list[int]:
        known = _step_ranges(footer)
        return [g for g, found in enumerate(known) if found is None or found[1] >= first_step]

    return choose


def to_columns(table: Table, rows: pa.Table, names: Sequence[str]) -> Columns:
    """Return columns of a table's rows as numpy arrays.

    Raises:
        KeyError: There is no such column.
    """
    return {name: to_numpy(rows[name], signal(table, name).dtype) for name in names}


def read_tail(files: Sequence[Path], schema: pa.Schema, first_step: int) -> Iterator[pa.Table]:
    """Yield what files in the order of their steps hold from a step on, earlier rows among it.

    Only files and row groups that may have rows of this step or later ones are read.

    Raises:
        RunError: A file cannot be read.
    """
    wanted: list[Path] = []
    for file in reversed(files):
        found = step_range_of(file)
        if found is None or found[1] >= first_step:
            wanted.append(file)
        if found is not None and found[0] <= first_step:
            break
    for file in reversed(wanted):
        yield read_part(file, schema, from_step(first_step))


def step_range_of(file: Path) -> tuple[int, int] | None:
    """Return the first and the last step in a file, None when its footer does not tell.

    Raises:
        RunError: The file cannot be read.
    """
    with _opened(file) as parquet:
        groups = _step_ranges(parquet.metadata)
    known = [group for group in groups if group is not None]
    if not known or len(known) < len(groups):
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def step_range(run: Path, table: Table) -> tuple[int, int] | None:
    """Return the first and the last step of a table, None without rows.

    Raises:
        RunError: A file cannot be read.
    """
    files = parts_in(run / table)
    ends = [step_range_of(file) or _range_in(file, table) for file in {*files[:1], *files[-1:]}]
    ranges = [found for found in ends if found is not None]
    if not ranges:
        return None
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _range_in(file: Path, table: Table) -> tuple[int, int] | None:
    steps = read_part(file, pa.schema([arrow_schema(table).field("step")]))["step"]
    return (min(steps).as_py(), max(steps).as_py()) if len(steps) else None


def _step_ranges(footer: Any) -> list[tuple[int, int] | None]:
    """Return the first and the last step of each row group, None where the footer does not tell."""
    ranges: list[tuple[int, int] | None] = []
    for group in map(footer.row_group, range(footer.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        steps = next((c for c in columns if c.path_in_schema == "step" and c.is_stats_set), None)
        ranges.append(steps and (int(steps.statistics.min), int(steps.statistics.max)))
    return ranges


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

    def choose(footer: Any) -> Sequence[int]:
        sizes_G = _sizes(footer)
        if sizes_G.sum() <= share or not len(sizes_G):
            return range(len(sizes_G))
        return list(_evenly(len(sizes_G), max(1, int(share // sizes_G.mean()))))

    parts = [read_part(files[index], schema, choose) for index in chosen.tolist()]
    return pa.concat_tables([schema.empty_table(), *parts])


def latest_rows(files: Sequence[Path], schema: pa.Schema, max_rows: int) -> pa.Table:
    """Return the last rows of a table, in whole row groups: at least one.

    Raises:
        RunError: A file cannot be read.
    """
    parts: list[pa.Table] = []
    left = max_rows

    def choose(footer: Any) -> Sequence[int]:
        sizes_G = _sizes(footer)
        fits = np.cumsum(sizes_G[::-1]) <= left
        count = max(int(fits.sum()), 0 if parts else 1)
        return range(len(sizes_G))[-count:] if count else ()

    for file in reversed(files):
        part = read_part(file, schema, choose)
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

    def choose(footer: Any) -> Sequence[int]:
        sizes_G = _sizes(footer)
        ends_G = np.cumsum(sizes_G)
        groups = np.unique(np.searchsorted(ends_G, rows_R, side="right"))
        groups = groups[groups < len(sizes_G)]  # all, unless another file has taken its place
        read.extend(np.arange(ends_G[g] - sizes_G[g], ends_G[g]) for g in groups.tolist())
        return list(groups)

    table = read_part(file, schema, choose)
    places = np.concatenate(read)
    return table.take(np.flatnonzero(np.isin(places, rows_R)))


def _evenly(length: int, count: int) -> Ints:
    """Return up to ``count`` indices below ``length``, evenly spaced, first and last included."""
    number = min(length, count)
    return np.unique(np.linspace(0, max(length - 1, 0), number).astype(np.int64))


def _num_rows(file: Path) -> int:
    with _opened(file) as parquet:
        return int(parquet.metadata.num_rows)


def _sizes(footer: Any) -> Ints:
    sizes = [footer.row_group(g).num_rows for g in range(footer.num_row_groups)]
    return np.array(sizes, np.int64)

"""The Parquet files of a run's tables, read file by file."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rankscope.core.signals import Table, signal, signals
from rankscope.errors import RunError
from rankscope.record.files import unreadable
from rankscope.record.schema import Array, arrow_schema, to_numpy

Columns = dict[str, Array]

_BLOCK_ROWS = 8192


def parts_of(run: Path, table: Table) -> list[Path]:
    """Return the files of one table of a run directory, in order.

    Raises:
        RunError: They cannot be listed.
    """
    return parts_in(run / table)


def parts_in(folder: Path) -> list[Path]:
    """Return the Parquet files of a directory in order; none when there is no such directory.

    Raises:
        RunError: They cannot be listed.
    """
    return [folder / name for name in _part_names(folder)]


def _part_names(folder: Path) -> list[str]:
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(folder, error) from error
    return [name for name in names if name.startswith("part-") and name.endswith(".parquet")]


def read_part(file: Path, schema: pa.Schema, first_step: int | None = None) -> pa.Table:
    """Read one file from a single open handle, shaped as a schema says.

    Args:
        file: A Parquet file.
        schema: The columns to return; those that the file lacks are null.
        first_step: Leave out row groups that end before this step.

    Raises:
        RunError: The file cannot be read.
    """
    try:
        with file.open("rb") as handle:
            rows = _read_rows(pq.ParquetFile(handle), schema.names, first_step)
        return shaped(rows, schema)
    except (OSError, pa.ArrowException) as error:
        raise unusable(file, error) from error


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
        yield read_part(file, schema, first_step)


def step_range_of(file: Path) -> tuple[int, int] | None:
    """Return the first and the last step in a file, None when its footer does not tell.

    Raises:
        RunError: The file cannot be read.
    """
    try:
        with file.open("rb") as handle:
            footer = pq.ParquetFile(handle).metadata
            groups = [_step_statistics(footer.row_group(g)) for g in range(footer.num_row_groups)]
    except (OSError, pa.ArrowException) as error:
        raise unusable(file, error) from error
    known = [group for group in groups if group is not None]
    if not known or len(known) < len(groups):
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def step_range(run: Path, table: Table) -> tuple[int, int] | None:
    """Return the first and the last step of a table, None without rows.

    Raises:
        RunError: A file cannot be read.
    """
    names = _part_names(run / table)
    files = [run / table / name for name in {*names[:1], *names[-1:]}]
    ends = [step_range_of(file) or _range_in(file, table) for file in files]
    ranges = [found for found in ends if found is not None]
    if not ranges:
        return None
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _range_in(file: Path, table: Table) -> tuple[int, int] | None:
    steps = read_part(file, pa.schema([arrow_schema(table).field("step")]))["step"]
    return (min(steps).as_py(), max(steps).as_py()) if len(steps) else None


def blocks_of(run: Path, table: Table, first_step: int | None = None) -> Iterator[Columns]:
    """Yield a table in the order of its files as numpy columns, a few thousand rows at a time.

    Args:
        run: The run directory.
        table: The table.
        first_step: Leave out row groups that end before this step.

    Raises:
        RunError: A file cannot be read.
    """
    schema = arrow_schema(table)
    for file in parts_of(run, table):
        for batch in read_part(file, schema, first_step).to_batches(max_chunksize=_BLOCK_ROWS):
            block = pa.table(batch)
            yield {s.name: to_numpy(block[s.name], s.dtype) for s in signals(table)}


def last_step_of(run: Path) -> int | None:
    """Return the last step whose rows are all on disk, None without any.

    Raises:
        RunError: The last file of the steps cannot be read.
    """
    schema = pa.schema([arrow_schema(Table.STEPS).field("step")])
    for file in reversed(parts_of(run, Table.STEPS)):
        steps = read_part(file, schema)["step"]
        if len(steps):
            return int(steps[-1].as_py())
    return None


def _read_rows(file: Any, names: Sequence[str], first_step: int | None) -> pa.Table:
    """Return the named columns that the file has."""
    present = [name for name in file.schema_arrow.names if name in set(names)]
    if first_step is None:
        return file.read(columns=present)
    footer = file.metadata
    wanted = [
        g for g in range(footer.num_row_groups) if _may_reach(footer.row_group(g), first_step)
    ]
    return file.read_row_groups(wanted, columns=present)


def _may_reach(group: Any, first_step: int) -> bool:
    """Return whether a row group may have rows of this step or later ones."""
    known = _step_statistics(group)
    return known is None or known[1] >= first_step


def _step_statistics(group: Any) -> tuple[int, int] | None:
    """Return the first and the last step of a row group, None when the footer does not tell."""
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema == "step" and column.is_stats_set:
            return int(column.statistics.min), int(column.statistics.max)
    return None


def shaped(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows as a schema says; columns that they lack are null."""
    columns = [
        rows[field.name].cast(field.type)
        if field.name in rows.column_names
        else pa.nulls(len(rows), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def unusable(file: Path, error: Exception) -> RunError:
    """Return the error to raise when a file of a table cannot be read: damaged, or out of reach."""
    if isinstance(error, OSError) and error.errno is not None:  # Arrow's own have no number
        return unreadable(file, error)
    return RunError(f"cannot read {file}: it is damaged; remove it to read the rest")

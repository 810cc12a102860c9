"""The Parquet files of a run's tables, read file by file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rankscope.core.signals import Table, signals
from rankscope.errors import RunError
from rankscope.record.schema import Array, arrow_schema, to_numpy

Columns = dict[str, Array]

_BLOCK_ROWS = 8192


def parts_of(run: Path, table: Table) -> list[Path]:
    """Return the files of one table of a run directory, in order."""
    return sorted((run / table).glob("part-*.parquet"))


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
            rows = _read_rows(pq.ParquetFile(handle), first_step)
        columns = [
            rows[field.name].cast(field.type)
            if field.name in rows.column_names
            else pa.nulls(len(rows), field.type)
            for field in schema
        ]
        return pa.table(columns, schema=schema)
    except (OSError, pa.ArrowException) as error:
        raise RunError(f"cannot read {file}: it is damaged; remove it to read the rest") from error


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


def _read_rows(file: Any, first_step: int | None) -> pa.Table:
    if first_step is None:
        return file.read()
    footer = file.metadata
    wanted = [
        g for g in range(footer.num_row_groups) if _may_reach(footer.row_group(g), first_step)
    ]
    return file.read_row_groups(wanted)


def _may_reach(group: Any, first_step: int) -> bool:
    """Return whether a row group may have rows of this step or later ones."""
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema == "step" and column.is_stats_set:
            return bool(column.statistics.max >= first_step)
    return True

"""The Parquet files of a run's tables, read file by file.

Whole row groups are read, and no others; a row group holds whole steps, since a flush writes whole
steps. So a bounded part of a table can be read at any length: an even choice of rows, or the
latest. Other programs may write a table as one row group of any size: it is read in pieces.

Every function that reads raises a RunError where a file cannot be read.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rankscope.bus.evidence import DType, Table
from rankscope.bus.finding import MAX_WORKERS
from rankscope.errors import RunError
from rankscope.evidence import find_column
from rankscope.files import open_file, unreadable
from rankscope.record.schema import Array, arrow_schema, to_numpy
from rankscope.stats.arrays import Ints, evenly

Columns = dict[str, Array]

MAX_FILES = 32  # most files for an even choice of rows
LARGE_ROWS = 2**16  # most rows of a file's share in an even choice that are read whole
PIECE_VALUES = 2**18  # values of a column in memory at a time, for a table that is read in pieces

_MOST_ROWS = 2**20  # of the last row groups that are read whole, as after a flush of many workers
_BUFFER_BYTES = 2**20


def parts_in(folder: Path) -> list[Path]:
    """Return the Parquet files of a table's directory in order; none when it does not exist."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(folder, error) from error
    parts = [name for name in names if name.startswith("part-") and name.endswith(".parquet")]
    return [folder / name for name in parts]


_DAMAGES = (pa.ArrowException, ValueError, KeyError, TypeError, OverflowError)
"""Arrow's errors for a damaged file, or one with other columns than a table's."""

_FIRST_ROWS = 64  # rows from which the length of lists is estimated

Choice = Callable[[Any], Sequence[int]]  # from a file's footer, the row groups to read


@contextmanager
def _opened(file: Path, buffer_bytes: int = 0) -> Iterator[Any]:
    """Open a part once; ``buffer_bytes`` of a column are read at a time, 0: all of it."""
    try:
        with open_file(file) as handle:
            yield pq.ParquetFile(handle, buffer_size=buffer_bytes, pre_buffer=not buffer_bytes)
    except RunError:
        raise
    except MemoryError as error:
        raise RunError(
            f"there is not enough memory to read {file}: give the command more; the file is left "
            "as it is"
        ) from error
    except (OSError, *_DAMAGES) as error:
        if isinstance(error, OSError) and error.errno is not None:  # not Arrow's own
            raise unreadable(file, error) from error
        raise RunError(f"cannot read {file}: it is damaged; remove it to read the rest") from error


def read_part(file: Path, schema: pa.Schema, choose: Choice | None = None) -> pa.Table:
    """Read a schema's columns of one file, null where missing; ``choose`` picks row groups."""
    with _opened(file) as parquet:
        groups, present = _wanted(parquet, schema, choose)
        return _shaped(parquet.read_row_groups(groups, columns=present), schema)


def read_pieces(file: Path, schema: pa.Schema, choose: Choice | None = None) -> Iterator[pa.Table]:
    """Yield the rows of :func:`read_part`, some at a time, for row groups of any size."""
    with _opened(file, _BUFFER_BYTES) as parquet:
        groups, present = _wanted(parquet, schema, choose)
        size = max(1, int(PIECE_VALUES / _values_of_a_row(parquet, groups, present)))
        for batch in parquet.iter_batches(size, groups, present) if groups else ():
            yield _shaped(pa.table(batch), schema)


def _wanted(parquet: Any, schema: pa.Schema, choose: Choice | None) -> tuple[list[int], list[str]]:
    """Return the row groups to read, and the columns of a schema that a file has."""
    groups = range(parquet.num_row_groups) if choose is None else choose(parquet.metadata)
    present = [name for name in parquet.schema_arrow.names if name in set(schema.names)]
    return [int(group) for group in groups], present


def _values_of_a_row(parquet: Any, groups: Sequence[int], names: Sequence[str]) -> float:
    """Return the average length of the lists of the first rows; 1 without lists.

    The footer has the number of values, too, but Arrow crashes on a damaged one.
    """
    first = next(parquet.iter_batches(_FIRST_ROWS, groups[:1], names), None) if groups else None
    if first is None or not len(first):
        return 1.0
    lists = [column for column in first.columns if pa.types.is_list(column.type)]
    return max([1.0, *(len(column.flatten()) / len(first) for column in lists)])


def _shaped(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows with the columns of a schema, null where there are none."""
    columns = [
        rows[field.name].cast(field.type)
        if field.name in rows.column_names
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
    """Return all rows of a directory's files in order; none when it does not exist."""
    parts = [read_part(file, schema) for file in parts_in(folder)]
    return pa.concat_tables([schema.empty_table(), *parts])


def num_rows(files: Sequence[Path]) -> int:
    """Return the rows of a table, from the footers of its files."""
    return sum(map(_num_rows, files))


def num_values(files: Sequence[Path], name: str) -> int:
    """Estimate the number of values in a column's lists, from the first rows of each file."""
    total = 0.0
    for file in files:
        with _opened(file, _BUFFER_BYTES) as parquet:
            groups = range(parquet.num_row_groups)
            total += parquet.metadata.num_rows * _values_of_a_row(parquet, groups, [name])
    return round(total)


def thinned_rows(files: Sequence[Path], schema: pa.Schema, max_rows: int) -> pa.Table:
    """Return the rows of every n-th step of a table, at most ``max_rows``."""
    every = max(1, -(-num_rows(files) // max_rows))
    pieces = (piece for file in files for piece in read_pieces(file, schema))
    return _thinned(pieces, schema, every, max_rows, files)


def _thinned(
    pieces: Iterable[pa.Table],
    schema: pa.Schema,
    every: int,
    max_rows: int,
    files: Sequence[Path],
) -> pa.Table:
    """Return the rows of every n-th step, from rows in the order of their steps."""
    kept = [schema.empty_table()]
    total = 0
    seen = -1
    last = None
    for rows in pieces:
        steps = to_numpy(rows["step"], DType.INT)
        if not len(steps):
            continue
        before = ~steps[0] if last is None else last
        number = seen + np.cumsum(np.diff(steps, prepend=before) != 0)
        kept.append(rows.filter(pa.array(number % every == 0)))
        seen = int(number[-1])
        last = steps[-1]
        total += len(kept[-1])
        if total > 2 * max_rows + LARGE_ROWS:
            raise RunError(
                f"{files[0].parent} holds more than {total:,} rows in {seen // every + 1:,} steps, "
                "and so many are not read: no run has as many workers, and the files are damaged"
            )
    return pa.concat_tables(kept)


def from_step(first_step: int) -> Choice:
    """Return a choice of the row groups that may have rows of this step or later ones."""

    def choose(footer: Any) -> list[int]:
        known = _step_ranges(footer)
        return [g for g, found in enumerate(known) if found is None or found[1] >= first_step]

    return choose


def to_columns(table: Table, rows: pa.Table, names: Sequence[str]) -> Columns:
    """Return columns of a table's rows as numpy arrays."""
    return {name: to_numpy(rows[name], find_column(table, name).dtype) for name in names}


def read_tail(files: Sequence[Path], schema: pa.Schema, first_step: int) -> Iterator[pa.Table]:
    """Yield in pieces the rows of ordered files from a step on, perhaps with earlier ones."""
    wanted: list[Path] = []
    for file in reversed(files):
        found = step_range_of(file)
        if found is None or found[1] >= first_step:
            wanted.append(file)
        if found is not None and found[0] <= first_step:
            break
    for file in reversed(wanted):
        yield from read_pieces(file, schema, from_step(first_step))


def step_range_of(file: Path) -> tuple[int, int] | None:
    """Return the first and the last step in a file, None if not in its footer."""
    with _opened(file) as parquet:
        groups = _step_ranges(parquet.metadata)
    known = [group for group in groups if group is not None]
    if not known or len(known) < len(groups):
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def step_range(run: Path, table: Table) -> tuple[int, int] | None:
    """Return the first and the last step of a table, None without rows."""
    files = parts_in(run / table)
    ends = [step_range_of(file) or _range_in(file, table) for file in {*files[:1], *files[-1:]}]
    ranges = [found for found in ends if found is not None]
    if not ranges:
        return None
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _range_in(file: Path, table: Table) -> tuple[int, int] | None:
    schema = pa.schema([arrow_schema(table).field("step")])
    ends = [pc.min_max(rows["step"]).as_py() for rows in read_pieces(file, schema) if len(rows)]
    return (min(e["min"] for e in ends), max(e["max"] for e in ends)) if ends else None


def _step_ranges(footer: Any) -> list[tuple[int, int] | None]:
    """Return the first and the last step of each row group, None if not in the footer."""
    ranges: list[tuple[int, int] | None] = []
    for group in map(footer.row_group, range(footer.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        steps = next((c for c in columns if c.path_in_schema == "step" and c.is_stats_set), None)
        ranges.append(steps and (int(steps.statistics.min), int(steps.statistics.max)))
    return ranges


def even_rows(files: Sequence[Path], schema: pa.Schema, max_rows: int) -> pa.Table:
    """Return rows of evenly chosen row groups, at least one of each file: about ``max_rows``."""
    chosen = evenly(len(files), MAX_FILES)
    share = max_rows // max(len(chosen), 1)

    def choose(footer: Any) -> Sequence[int]:
        sizes_G = _sizes(footer)
        if sizes_G.sum() <= share or not len(sizes_G):
            return range(len(sizes_G))
        return list(evenly(len(sizes_G), max(1, int(share // sizes_G.mean()))))

    parts = [_even_part(files[index], schema, choose, share) for index in chosen.tolist()]
    return pa.concat_tables([schema.empty_table(), *parts])


def _even_part(file: Path, schema: pa.Schema, choose: Choice, share: int) -> pa.Table:
    most = max(share, LARGE_ROWS)
    rows = _num_rows(file, choose)
    if rows <= most:
        return read_part(file, schema, choose)
    pieces = read_pieces(file, schema, choose)
    return _thinned(pieces, schema, -(-rows // most), most, [file])


def latest_rows(files: Sequence[Path], schema: pa.Schema, max_rows: int) -> pa.Table:
    """Return the last rows of a table, in whole row groups: at least one, unless it is large."""
    parts: list[pa.Table] = []
    left = max_rows
    whole = True

    def choose(footer: Any) -> Sequence[int]:
        nonlocal whole
        sizes_G = _sizes(footer)
        fits = np.cumsum(sizes_G[::-1]) <= left
        count = max(int(fits.sum()), 0 if parts else 1)
        whole = count == len(sizes_G)
        return range(len(sizes_G))[-count:] if count else ()

    for file in reversed(files):
        part = _last_part(file, schema, choose, max(left, LARGE_ROWS))
        if not len(part) and parts:
            break
        parts.insert(0, part)
        left -= len(part)
        if not whole:  # earlier files would leave a gap
            break
    return pa.concat_tables([schema.empty_table(), *parts])


def _last_part(file: Path, schema: pa.Schema, choose: Choice, max_rows: int) -> pa.Table:
    if _num_rows(file, choose) <= _MOST_ROWS:
        return read_part(file, schema, choose)
    kept = deque([schema.empty_table()])
    total = 0
    for rows in read_pieces(file, schema, choose):
        kept.append(rows)
        total += len(rows)
        while total - len(kept[0]) >= max_rows:
            total -= len(kept.popleft())
    return pa.concat_tables(kept)


def even_single_rows(files: Sequence[Path], schema: pa.Schema, max_rows: int) -> pa.Table:
    """Return ``max_rows`` even rows of a table of one large row per step, first and last too."""
    ends = np.cumsum([0, *map(_num_rows, files)])
    wanted = evenly(int(ends[-1]), max_rows)
    parts = []
    for file, start, end in zip(files, ends[:-1], ends[1:], strict=True):
        rows_R = wanted[(wanted >= start) & (wanted < end)] - start
        if len(rows_R):
            parts.append(_rows_at(file, schema, rows_R))
    return pa.concat_tables([schema.empty_table(), *parts])


def _rows_at(file: Path, schema: pa.Schema, rows_R: Ints) -> pa.Table:
    """Return the rows with these numbers from the present row groups of a file.

    A flush merges row groups, but never changes the number of a row.
    """
    wanted: list[Ints] = []

    def choose(footer: Any) -> Sequence[int]:
        sizes_G = _sizes(footer)
        ends_G = np.cumsum(sizes_G)
        group_R = np.searchsorted(ends_G, rows_R, side="right")
        groups = np.unique(group_R)
        groups = groups[groups < len(sizes_G)]  # fewer if another file has replaced it
        ends = np.cumsum(sizes_G[groups])
        for group, skipped in zip(groups, ends_G[groups] - ends, strict=True):
            wanted.append(rows_R[group_R == group] - skipped)
        return list(groups)

    found = [schema.empty_table()]
    begin = 0
    for rows in read_pieces(file, schema, choose):
        places = np.concatenate(wanted) - begin
        found.append(rows.take(places[(places >= 0) & (places < len(rows))]))
        begin += len(rows)
    return pa.concat_tables(found)


def _num_rows(file: Path, choose: Choice | None = None) -> int:
    with _opened(file) as parquet:
        footer = parquet.metadata
        return int(footer.num_rows if choose is None else _sizes(footer)[[*choose(footer)]].sum())


def _sizes(footer: Any) -> Ints:
    sizes = [footer.row_group(g).num_rows for g in range(footer.num_row_groups)]
    return np.array(sizes, np.int64)

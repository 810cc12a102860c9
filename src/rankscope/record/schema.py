"""The tables of a run as Arrow and numpy see them, derived from the signal registry.

A missing value is null in Arrow; in numpy it is NaN in a float column, ``MISSING_INT`` in an
integer one and False in a boolean one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rankscope.core.signals import DType, Signal, Source, Table, signal, signals
from rankscope.core.step import MISSING_INT

SCHEMA_VERSION = 1
"""Raised when an older reader would misread a run; a new column alone does not raise it."""

Array = NDArray[Any]

_ARROW = {
    DType.INT: pa.int64(),
    DType.FLOAT: pa.float64(),
    DType.BOOL: pa.bool_(),
    DType.TEXT: pa.string(),
    DType.INTS: pa.list_(pa.int64()),
    DType.FLOATS: pa.list_(pa.float32()),
}
_NUMPY: dict[DType, type[np.generic]] = {
    DType.INT: np.int64,
    DType.FLOAT: np.float64,
    DType.BOOL: np.bool_,
    DType.TEXT: np.object_,
    DType.INTS: np.int64,
    DType.FLOATS: np.float32,
}
_FILL = {DType.FLOAT: np.nan, DType.INT: MISSING_INT, DType.BOOL: False, DType.TEXT: ""}
_LISTS = (DType.INTS, DType.FLOATS)


def arrow_schema(table: Table) -> pa.Schema:
    """Return the Arrow schema of one table."""
    return schema_of(signals(table))


def schema_of(columns: Sequence[Signal]) -> pa.Schema:
    """Return the Arrow schema of declared columns.

    Every field carries its unit and meaning as metadata. Only columns that name the row (source
    KEY) cannot be null.
    """
    fields = [
        pa.field(
            signal.name,
            _ARROW[signal.dtype],
            nullable=signal.source is not Source.KEY,
            metadata={"unit": signal.unit, "meaning": signal.meaning},
        )
        for signal in columns
    ]
    return pa.schema(fields, metadata={"rankscope.schema_version": str(SCHEMA_VERSION)})


def schema_with(table: Table, names: Sequence[str]) -> pa.Schema:
    """Return the Arrow schema of some columns of a table, in the table's order.

    Raises:
        KeyError: There is no such column.
    """
    full = arrow_schema(table)
    for name in names:
        signal(table, name)
    return pa.schema([field for field in full if field.name in set(names)], full.metadata)


def row_keys(table: Table) -> tuple[str, ...]:
    """Return the columns that order a table: step, then rank and micro-batch where it has them."""
    names = {signal.name for signal in signals(table)}
    return tuple(name for name in ("step", "rank", "micro") if name in names)


def is_list(dtype: DType) -> bool:
    """Return whether a cell of this type holds several values."""
    return dtype in _LISTS


def to_arrow(values: Array, dtype: DType) -> pa.Array:
    """Return a column of single values as Arrow, with missing ones as null.

    Args:
        values: ``[rows]``, of a float, integer or boolean type. Floats are accepted for an integer
            column: there, whatever is not finite is missing.
        dtype: The declared type of the column.
    """
    if dtype is DType.TEXT:
        return pa.array(values.tolist(), pa.string())
    if dtype is DType.FLOAT:
        return pa.array(np.asarray(values, np.float64), from_pandas=True)
    if values.dtype.kind == "f":
        missing = ~np.isfinite(values)
        values = np.where(missing, 0, np.rint(values))
    else:
        missing = values == MISSING_INT if values.dtype.kind == "i" else np.zeros(len(values), bool)
    return pa.array(values.astype(_NUMPY[dtype]), mask=missing)


def to_arrow_lists(cells: Sequence[Array], dtype: DType) -> pa.Array:
    """Return a column of lists as Arrow: one array of any length per row, NaN as null."""
    offsets = np.zeros(len(cells) + 1, np.int32)
    np.cumsum([len(cell) for cell in cells], out=offsets[1:])
    flat = np.concatenate([np.empty(0, _NUMPY[dtype]), *cells]).astype(_NUMPY[dtype])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, from_pandas=True))


def to_numpy(column: pa.ChunkedArray, dtype: DType) -> Array:
    """Return a column as numpy, with nulls as the module's docstring says.

    A column of lists becomes an object array of numpy arrays; a null list is an empty one.
    """
    column = column.combine_chunks()
    if is_list(dtype):
        return _lists_to_numpy(column, dtype)
    fill = _FILL[dtype]
    filled = column.fill_null(pa.scalar(fill, _ARROW[dtype])) if column.null_count else column
    return np.array(filled.to_numpy(zero_copy_only=False), _NUMPY[dtype])


def _lists_to_numpy(column: pa.Array, dtype: DType) -> Array:
    values = column.flatten()
    fill = pa.scalar(np.nan if dtype is DType.FLOATS else MISSING_INT, values.type)
    flat = np.array(values.fill_null(fill).to_numpy(zero_copy_only=False), _NUMPY[dtype])
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths)
    cells = np.empty(len(column), dtype=object)
    for row, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        cells[row] = flat[end - length : end]
    return cells

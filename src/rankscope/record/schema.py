"""The tables of a run as Arrow and numpy see them, derived from the signal registry.

A missing value is null in Arrow; in numpy it is NaN in a float column, ``MISSING_INT`` in an
integer one and False in a boolean one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rankscope.bus.evidence import Column, DType, Source, Table
from rankscope.evidence import columns_of, find_column
from rankscope.record.begin import SCHEMA_VERSION
from rankscope.stats.arrays import MISSING_INT, Bools

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
FILL = {DType.FLOAT: np.nan, DType.INT: MISSING_INT, DType.BOOL: False, DType.TEXT: ""}
"""What stands for a null in numpy."""
_LISTS = (DType.INTS, DType.FLOATS)


def arrow_schema(table: Table) -> pa.Schema:
    """Return the Arrow schema of one table."""
    return schema_of(columns_of(table))


def schema_of(columns: Sequence[Column]) -> pa.Schema:
    """Return the Arrow schema of columns, with unit and meaning; only keys cannot be null."""
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
    """Return the Arrow schema of some columns of a table, in the table's order."""
    full = arrow_schema(table)
    for name in names:
        find_column(table, name)
    return pa.schema([field for field in full if field.name in set(names)], full.metadata)


def row_keys(table: Table) -> tuple[str, ...]:
    """Return the columns that order a table: step, then rank and micro-batch where it has them."""
    names = {signal.name for signal in columns_of(table)}
    return tuple(name for name in ("step", "rank", "micro") if name in names)


def is_list(dtype: DType) -> bool:
    """Return whether a cell of this type holds several values."""
    return dtype in _LISTS


def to_arrow(values: Array, dtype: DType) -> pa.Array:
    """Return single values ``[rows]`` as Arrow; missing ones, and non-finite integers, are null."""
    if dtype is DType.TEXT:
        return _texts(values.tolist())
    if dtype is DType.FLOAT:
        values = values.astype(np.float64)
        return _arrow(values, np.isnan(values), dtype)
    if values.dtype.kind == "f":
        missing = ~np.isfinite(values)
        values = np.where(missing, 0, np.rint(values))
    else:
        missing = values == MISSING_INT if values.dtype.kind == "i" else np.zeros(len(values), bool)
    return _arrow(values.astype(_NUMPY[dtype]), missing, dtype)


def to_arrow_lists(cells: Sequence[Array], dtype: DType) -> pa.Array:
    """Return a column of lists as Arrow: one array of any length per row, NaN as null."""
    flat = np.concatenate([np.empty(0, _NUMPY[dtype]), *cells]).astype(_NUMPY[dtype])
    missing = np.isnan(flat) if flat.dtype.kind == "f" else np.zeros(len(flat), bool)
    buffers = [None, _offsets([len(cell) for cell in cells])]
    children = [_arrow(flat, missing, dtype)]
    return pa.Array.from_buffers(_ARROW[dtype], len(cells), buffers, children=children)


def _arrow(values: Array, missing: Bools, dtype: DType) -> pa.Array:
    """Return numpy's bytes as Arrow.

    ``pa.array`` would import an installed pandas in the middle of the training, and hold the
    interpreter's lock for most of a second.
    """
    arrow_type = _ARROW[dtype].value_type if is_list(dtype) else _ARROW[dtype]
    valid = pa.py_buffer(_bits(~missing)) if missing.any() else None
    content = _bits(values) if values.dtype == np.bool_ else np.ascontiguousarray(values)
    return pa.Array.from_buffers(arrow_type, len(values), [valid, pa.py_buffer(content)])


def _texts(texts: Sequence[str]) -> pa.Array:
    encoded = [text.encode() for text in texts]
    buffers = [None, _offsets([len(one) for one in encoded]), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(_ARROW[DType.TEXT], len(texts), buffers)


def _offsets(lengths: Sequence[int]) -> pa.Buffer:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.py_buffer(offsets)


def _bits(flags: Bools) -> Array:
    return np.packbits(flags, bitorder="little")


def to_numpy(column: pa.ChunkedArray, dtype: DType) -> Array:
    """Return a column as numpy, nulls as in the module's docstring; lists as an array of arrays."""
    column = column.combine_chunks()
    if is_list(dtype):
        return _lists_to_numpy(column, dtype)
    fill = FILL[dtype]
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

import math
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rankscope.bus.evidence import DType, Table
from rankscope.bus.step import MISSING_INT
from rankscope.errors import UsageError
from rankscope.record.schema import (
    SCHEMA_VERSION,
    arrow_schema,
    row_keys,
    schema_with,
    to_arrow,
    to_arrow_lists,
    to_numpy,
)

untimed = settings(deadline=None)

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT32 = st.floats(width=32)


def round_trip(column: pa.Array, dtype: DType) -> np.ndarray:
    return to_numpy(pa.chunked_array([column[:1], column[1:]]), dtype)


def none_if_nan(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def test_a_column_that_is_not_there_is_an_error():
    assert schema_with(Table.STEPS, ["loss_mean", "step"]).names == ["step", "loss_mean"]
    with pytest.raises(UsageError, match="loss_men"):
        schema_with(Table.STEPS, ["step", "loss_men"])


def test_the_published_columns_have_their_types():
    assert arrow_schema(Table.STEPS).field("loss_mean").type == pa.float64()
    assert arrow_schema(Table.STEPS).field("observed").type == pa.bool_()
    assert arrow_schema(Table.STEPS).field("samples_distinct").type == pa.int64()
    assert arrow_schema(Table.SAMPLES).field("samples").type == pa.list_(pa.int64())
    assert arrow_schema(Table.PAIRS).field("cosines").type == pa.list_(pa.float32())
    assert arrow_schema(Table.DIGESTS).field("name").type == pa.string()
    assert arrow_schema(Table.DIGESTS).field("digest").type == pa.int64()


def test_only_what_names_a_row_cannot_be_null():
    required = {
        table: [field.name for field in arrow_schema(table) if not field.nullable]
        for table in Table
    }
    assert required == {
        Table.STEPS: ["step", "time", "observed"],
        Table.WORKERS: ["step", "rank"],
        Table.MICRO: ["step", "rank", "micro"],
        Table.SAMPLES: ["step", "rank"],
        Table.PAIRS: ["step"],
        Table.GROUPS: ["step", "rank", "group"],
        Table.DIGESTS: ["step", "rank", "kind", "name"],
        Table.TRACES: ["step", "kind", "name"],
    }


def test_fields_carry_unit_and_meaning():
    field = arrow_schema(Table.WORKERS).field("loss_weight")
    assert field.metadata[b"unit"] == b"tokens"
    assert b"label tokens" in field.metadata[b"meaning"]
    assert arrow_schema(Table.PAIRS).metadata == {
        b"rankscope.schema_version": str(SCHEMA_VERSION).encode()
    }


@pytest.mark.parametrize(
    ("table", "keys"),
    [
        (Table.STEPS, ("step",)),
        (Table.WORKERS, ("step", "rank")),
        (Table.MICRO, ("step", "rank", "micro")),
        (Table.PAIRS, ("step",)),
        (Table.DIGESTS, ("step", "rank")),
    ],
)
def test_rows_are_ordered_by_step_first(table, keys):
    assert row_keys(table) == keys


@untimed
@given(hnp.arrays(np.float64, st.integers(0, 20)))
def test_nan_is_null_and_every_other_float_itself(values):
    column = to_arrow(values, DType.FLOAT)
    assert column.to_pylist() == none_if_nan(values)
    np.testing.assert_array_equal(round_trip(column, DType.FLOAT), values)


@untimed
@given(st.lists(st.one_of(INT64, st.just(MISSING_INT)), max_size=20))
def test_missing_int_is_null_and_every_other_integer_itself(numbers):
    values = np.array(numbers, np.int64)
    column = to_arrow(values, DType.INT)
    assert column.to_pylist() == [None if n == MISSING_INT else n for n in numbers]
    np.testing.assert_array_equal(round_trip(column, DType.INT), values)


@untimed
@given(st.lists(st.one_of(st.none(), st.integers(-(2**53), 2**53)), max_size=20))
def test_floats_fill_an_integer_column(numbers):
    values = np.array([np.nan if n is None else float(n) for n in numbers])
    assert to_arrow(values, DType.INT).to_pylist() == numbers


def test_an_infinite_count_is_no_count():
    assert to_arrow(np.array([np.inf, -np.inf, 2.0]), DType.INT).to_pylist() == [None, None, 2]


@untimed
@given(st.lists(st.booleans(), max_size=20))
def test_booleans_stay_booleans(flags):
    column = to_arrow(np.array(flags, bool), DType.BOOL)
    assert column.to_pylist() == flags
    assert round_trip(column, DType.BOOL).tolist() == flags


def test_a_missing_boolean_reads_as_false():
    assert to_numpy(pa.chunked_array([[True, None]]), DType.BOOL).tolist() == [True, False]


@untimed
@given(st.lists(st.lists(INT64, max_size=5), max_size=8))
def test_lists_of_integers_keep_every_bit(rows):
    column = to_arrow_lists([np.array(row, np.int64) for row in rows], DType.INTS)
    assert column.to_pylist() == rows
    assert [cell.tolist() for cell in round_trip(column, DType.INTS)] == rows


@untimed
@given(st.lists(st.lists(FLOAT32, max_size=5), max_size=8))
def test_undefined_entries_of_a_list_are_null(rows):
    cells = [np.array(row, np.float64) for row in rows]
    column = to_arrow_lists(cells, DType.FLOATS)
    assert column.to_pylist() == [none_if_nan(cell) for cell in cells]
    for cell, original in zip(round_trip(column, DType.FLOATS), cells, strict=True):
        assert cell.dtype == np.float32
        np.testing.assert_array_equal(cell, original)


@untimed
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=5), max_size=8))
def test_texts_stay_themselves(texts):
    column = to_arrow(np.array([*texts, ""], object)[:-1], DType.TEXT)
    assert column.to_pylist() == texts
    assert round_trip(column, DType.TEXT).tolist() == texts


def test_no_column_imports_pandas():
    """Its import takes most of a second, which the training would spend in waiting for the lock."""
    work = """
import sys, numpy as np
from rankscope.bus.evidence import DType
from rankscope.record.writer import GrowingPart
from rankscope.record.schema import pa, to_arrow, to_arrow_lists
cells = [np.array([1.0, np.nan]), np.array([])]
columns = {
    "float": to_arrow(np.array([1.0, np.nan]), DType.FLOAT),
    "int": to_arrow(np.array([1.0, np.nan]), DType.INT),
    "bool": to_arrow(np.array([True, False]), DType.BOOL),
    "text": to_arrow(np.array(["a", "b"], object), DType.TEXT),
    "floats": to_arrow_lists(cells, DType.FLOATS),
}
part, _ = GrowingPart().grown(pa.table(columns))
part.grown(pa.table(columns))
assert part.num_bytes and "pandas" not in sys.modules
import pandas
"""
    subprocess.run([sys.executable, "-c", work], check=True)


def test_a_null_list_reads_as_an_empty_one():
    column = pa.chunked_array([pa.array([[1, 2], None, [], [3]], pa.list_(pa.int64()))])
    assert [cell.tolist() for cell in to_numpy(column, DType.INTS)] == [[1, 2], [], [], [3]]


def test_what_is_read_can_be_changed():
    column = pa.chunked_array([to_arrow(np.arange(3.0), DType.FLOAT)])
    to_numpy(column, DType.FLOAT)[0] = 9.0
    assert column.to_pylist() == [0.0, 1.0, 2.0]

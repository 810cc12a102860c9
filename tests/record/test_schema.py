import math
import subprocess
import sys

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rankscope.bus.evidence import DType
from rankscope.record.schema import (
    to_arrow,
    to_numpy,
)

untimed = settings(deadline=None)


def round_trip(column: pa.Array, dtype: DType) -> np.ndarray:
    return to_numpy(pa.chunked_array([column[:1], column[1:]]), dtype)


def none_if_nan(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


@untimed
@given(hnp.arrays(np.float64, st.integers(0, 20)))
def test_nan_is_null_and_every_other_float_itself(values):
    column = to_arrow(values, DType.FLOAT)
    assert column.to_pylist() == none_if_nan(values)
    np.testing.assert_array_equal(round_trip(column, DType.FLOAT), values)


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

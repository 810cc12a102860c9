import io

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.record.writer import GrowingPart


def make_rows(start, num_rows):
    steps = np.arange(start, start + num_rows)
    return pa.table(
        {"step": steps, "loss": np.sin(steps), "ids": [[s, -s] for s in steps.tolist()]}
    )


def grow(lengths):
    """Return what the file holds in all versions of a part to which blocks of rows were added."""
    part, contents, start = GrowingPart(), [b""], 0
    for num_rows in lengths:
        part, tail = part.grown(make_rows(start, num_rows))
        contents.append(contents[-1] + tail)
        assert part.size == len(contents[-1])
        start += num_rows
    return contents[1:]


BLOCKS = st.lists(st.integers(1, 5), min_size=1, max_size=40)


@settings(max_examples=25, deadline=None)
@given(BLOCKS)
def test_every_version_holds_all_rows_in_order(lengths):
    for version, total in zip(grow(lengths), np.cumsum(lengths).tolist(), strict=True):
        expected = make_rows(0, total).to_pydict()
        assert pq.read_table(io.BytesIO(version)).to_pydict() == expected
        assert pl.read_parquet(io.BytesIO(version)).to_dict(as_series=False) == expected


def test_an_old_footer_reads_old_rows_from_a_new_version():
    old, *_, new = grow([3] * 30)
    footer = pq.read_metadata(io.BytesIO(old))
    rows = pq.ParquetFile(io.BytesIO(new), metadata=footer).read()
    assert rows.to_pydict() == make_rows(0, 3).to_pydict()


@pytest.mark.parametrize("num_rows", [700, 8_000])
def test_rows_that_are_merged_no_more_are_not_kept_in_memory(num_rows):
    rows, part, before = make_rows(0, num_rows), GrowingPart(), pa.total_allocated_bytes()
    for _ in range(100):
        part, _ = part.grown(rows)
    assert part.num_bytes > 100 * rows.nbytes * 0.9
    assert pa.total_allocated_bytes() - before < 3 * 2**20

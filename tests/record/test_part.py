import io
from itertools import pairwise

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.record.part import GrowingPart


def make_rows(start, num_rows):
    steps = np.arange(start, start + num_rows)
    return pa.table(
        {"step": steps, "loss": np.sin(steps), "ids": [[s, -s] for s in steps.tolist()]}
    )


def grow(lengths):
    """Return all versions of a part to which blocks of rows were added."""
    versions, start = [GrowingPart()], 0
    for num_rows in lengths:
        versions.append(versions[-1].grown(make_rows(start, num_rows)))
        start += num_rows
    return versions[1:]


BLOCKS = st.lists(st.integers(1, 5), min_size=1, max_size=40)


@settings(max_examples=25, deadline=None)
@given(BLOCKS)
def test_every_version_holds_all_rows_in_order(lengths):
    for version, total in zip(grow(lengths), np.cumsum(lengths).tolist(), strict=True):
        expected = make_rows(0, total).to_pydict()
        assert pq.read_table(io.BytesIO(version.content)).to_pydict() == expected
        assert pl.read_parquet(io.BytesIO(version.content)).to_dict(as_series=False) == expected


@settings(max_examples=25, deadline=None)
@given(BLOCKS)
def test_every_version_begins_with_the_one_before(lengths):
    versions = grow(lengths)
    for before, after in pairwise(versions):
        assert after.content.startswith(before.content)


def test_an_old_footer_reads_old_rows_from_a_new_version():
    old, *_, new = grow([3] * 30)
    footer = pq.read_metadata(io.BytesIO(old.content))
    rows = pq.ParquetFile(io.BytesIO(new.content), metadata=footer).read()
    assert rows.to_pydict() == make_rows(0, 3).to_pydict()


def test_the_number_of_row_groups_grows_like_a_logarithm():
    last = grow([1] * 256)[-1]
    assert pq.read_metadata(io.BytesIO(last.content)).num_row_groups <= 3 * 5


def test_large_row_groups_are_not_rewritten():
    versions = grow([8_000] * 12)
    sizes = [len(version.content) for version in versions]
    assert max(np.diff(sizes)) < 2 * sizes[0]


def test_a_version_is_not_changed_by_the_next():
    first = GrowingPart().grown(make_rows(0, 2))
    content = first.content
    first.grown(make_rows(2, 2))
    again = first.grown(make_rows(2, 2))
    assert first.content == content
    assert pq.read_table(io.BytesIO(again.content)).num_rows == 4

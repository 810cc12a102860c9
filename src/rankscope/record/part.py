"""A Parquet file that grows under its readers.

Some readers open a file more than once: Polars asks for its size, then reads the footer, then the
data. When the file is replaced in between, they meet parts of two versions. So every version
begins with all bytes of the version before it::

    version 1    PAR1 rows-a footer(a)
    version 2    PAR1 rows-a footer(a) rows-b footer(a, b)

An old size finds the old footer, an old footer finds the old rows: whatever the reader mixes, it
sees one whole version. Rows are compressed once when they come, and a few times more when small
row groups are merged. The price is what old footers and merges leave behind, 10 to 20 kB per
version and table; footers are therefore kept short, without descriptions of the columns.
"""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_MAGIC = b"PAR1"
_MERGE = 4
"""Row groups of one level that are merged into one of the next."""
_LARGE_GROUP_BYTES = 512 * 2**10
"""Arrow bytes from which a row group is merged no more."""


@dataclass(frozen=True, slots=True)
class _Group:
    rows: pa.Table
    num_bytes: int
    level: int
    footer: Any
    """Metadata of a file that has this row group only."""


class GrowingPart:
    """The versions of one Parquet file; immutable: ``grown`` returns the next version.

    Attributes:
        content: What the file holds.
    """

    def __init__(self) -> None:
        self._groups: tuple[_Group, ...] = ()
        self.content = b""

    @property
    def num_bytes(self) -> int:
        """Arrow bytes of all rows, or bytes of the file where these are more."""
        return max(len(self.content), sum(group.num_bytes for group in self._groups))

    def grown(self, rows: pa.Table) -> "GrowingPart":
        """Return the version with more rows, whose content begins with this one's."""
        groups, rows, level = self._merged(rows)
        content, footer = _write_group(self.content, rows)
        part = GrowingPart()
        part._groups = (*groups, _Group(rows, int(rows.nbytes), level, footer))
        part.content = content + _common_footer(part._groups)
        return part

    def _merged(self, rows: pa.Table) -> tuple[tuple[_Group, ...], pa.Table, int]:
        """Merge new rows with the last groups while there are enough of one level."""
        groups, level = self._groups, 0
        while [g.level for g in groups[1 - _MERGE :]] == [level] * (_MERGE - 1):
            merged = pa.concat_tables([*(g.rows for g in groups[1 - _MERGE :]), rows])
            if merged.nbytes > _LARGE_GROUP_BYTES:
                break
            groups, rows, level = groups[: 1 - _MERGE], merged, level + 1
        return groups, rows.combine_chunks(), level


def _write_group(before: bytes, rows: pa.Table) -> tuple[bytes, Any]:
    """Write rows as one row group behind the bytes that a file holds already.

    Returns:
        The content of the file up to the end of the rows, and the metadata of a file that has no
        other rows there.
    """
    footers: list[Any] = []
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        rows.schema,
        compression="zstd",
        store_schema=False,
        write_statistics=["step", "rank"],
        metadata_collector=footers,
    ) as writer:  # has written the first four bytes now
        sink.write(before[len(_MAGIC) :])
        writer.write_table(rows, row_group_size=len(rows))
        end = sink.tell()
    return bytes(sink.getvalue().slice(0, end).to_pybytes()), footers[0]


def _common_footer(groups: tuple[_Group, ...]) -> bytes:
    """Return a footer that names all row groups in order."""
    footer = _read_footer(_footer_file(groups[0].footer))
    for group in groups[1:]:
        footer.append_row_groups(group.footer)
    return _footer_file(footer)[len(_MAGIC) :]


def _footer_file(footer: Any) -> bytes:
    sink = pa.BufferOutputStream()
    footer.write_metadata_file(sink)
    return bytes(sink.getvalue().to_pybytes())


def _read_footer(file: bytes) -> Any:
    return pq.read_metadata(pa.BufferReader(file))

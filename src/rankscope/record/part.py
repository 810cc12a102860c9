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

In memory there is no more than the rows of those row groups that may still be merged, 2 MB at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_MAGIC = b"PAR1"
_MERGE = 4
"""Row groups of one level that are merged into one of the next."""
_LARGE_GROUP_BYTES = 512 * 2**10
"""Arrow bytes from which a row group is merged no more."""
_SKIP = bytes(2**20)
_KEYS = ("step", "rank")
"""Columns of few values: those and texts have dictionaries, numbers take longer with one."""


@dataclass(frozen=True, slots=True)
class _Group:
    rows: pa.Table | None
    """None once it can be merged no more."""
    num_bytes: int
    level: int
    footer: Any
    """Metadata of a file that has this row group only."""


class GrowingPart:
    """The versions of one Parquet file; immutable: ``grown`` returns the next version.

    Attributes:
        size: Bytes of the file.
    """

    def __init__(self) -> None:
        self._groups: tuple[_Group, ...] = ()
        self.size = 0

    @property
    def num_bytes(self) -> int:
        """Arrow bytes of all rows, or bytes of the file where these are more."""
        return max(self.size, sum(group.num_bytes for group in self._groups))

    def grown(self, rows: pa.Table) -> tuple["GrowingPart", bytes]:
        """Return the version with more rows, and what its file holds behind this one's bytes."""
        groups, rows, level = self._merged(rows)
        written, footer = _write_group(self.size, rows)
        part = GrowingPart()
        part._groups = _forgotten((*groups, _Group(rows, int(rows.nbytes), level, footer)))
        tail = written + _common_footer(part._groups)
        part.size = self.size + len(tail)
        return part, tail

    def _merged(self, rows: pa.Table) -> tuple[tuple[_Group, ...], pa.Table, int]:
        """Merge new rows with the last groups while there are enough of one level."""
        groups, level = self._groups, 0
        while [g.level for g in groups[1 - _MERGE :]] == [level] * (_MERGE - 1):
            last = groups[1 - _MERGE :]
            size = sum(group.num_bytes for group in last) + rows.nbytes
            kept = [group.rows for group in last if group.rows is not None]
            if size > _LARGE_GROUP_BYTES or len(kept) < len(last):
                break
            groups, rows, level = groups[: 1 - _MERGE], pa.concat_tables([*kept, rows]), level + 1
        return groups, rows.combine_chunks(), level


def _forgotten(groups: Sequence[_Group]) -> tuple[_Group, ...]:
    """Return the groups without the rows of those that will not be merged.

    A group is merged with its neighbours of the same level, of which it needs three and no more,
    with none of a higher level behind it.
    """
    kept, highest, behind = [], 0, 0
    for group in reversed(groups):
        behind = behind + 1 if group.level == highest else 1
        may_merge = group.level >= highest and behind < _MERGE
        highest = max(highest, group.level)
        may_merge = may_merge and group.num_bytes < _LARGE_GROUP_BYTES
        kept.append(group if may_merge or group.rows is None else replace(group, rows=None))
    return tuple(reversed(kept))


class _Tail:
    """A file whose first bytes are there already: it takes no more than what comes behind them.

    Args:
        size: How many are there.
    """

    closed = False

    def __init__(self, size: int) -> None:
        self._skipped = size
        self._pieces: list[bytes] = []

    def write(self, piece: bytes) -> None:
        """Take the next bytes."""
        skipped = min(self._skipped, len(piece))
        self._skipped -= skipped
        self._pieces.append(piece[skipped:])

    def flush(self) -> None:
        """Do nothing: all is in memory."""

    def close(self) -> None:
        """Do nothing."""

    def content(self) -> bytes:
        """Return the bytes behind those that were there."""
        return b"".join(self._pieces)


def _write_group(size: int, rows: pa.Table) -> tuple[bytes, Any]:
    """Write rows as one row group behind the bytes that a file holds already.

    Args:
        size: How many these are.
        rows: The rows.

    Returns:
        The bytes up to the end of the rows, and the metadata of a file that has no other rows
        there.
    """
    footers: list[Any] = []
    tail = _Tail(size)
    sink = pa.PythonFile(tail, mode="w")
    with pq.ParquetWriter(
        sink,
        rows.schema,
        compression="zstd",
        use_dictionary=[f.name for f in rows.schema if f.name in _KEYS or f.type == pa.string()],
        store_schema=False,
        write_statistics=list(_KEYS),
        metadata_collector=footers,
    ) as writer:  # has written the first four bytes now
        for start in range(len(_MAGIC), size, len(_SKIP)):  # Arrow counts, and asks nobody
            sink.write(_SKIP[: size - start])
        writer.write_table(rows, row_group_size=len(rows))
        written = tail.content()
    return written, footers[0]


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

"""Writing a run directory that other programs may read at any moment.

Every file is written under a hidden name and then renamed over the old one, so that readers always
see a complete file. The last Parquet part of a table grows at each flush until it is large, and
then stays as it is: few files, and never a row twice or a gap.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rankscope.bus.evidence import Column, DType, Table
from rankscope.bus.finding import Finding
from rankscope.bus.pace import PACE
from rankscope.bus.replicas import TRACE_WIDTH
from rankscope.bus.step import StepReport
from rankscope.errors import RunError
from rankscope.evidence import columns_of
from rankscope.files import (
    append,
    is_file,
    make_folder,
    overwrite,
    replace,
    to_plain,
    write_error,
)
from rankscope.record.begin import FINDINGS_FILE, INFO_FILE, begin_run, now, text_of
from rankscope.record.place import DirectoryPlace
from rankscope.record.rollups import RollupRows, columns_by_folder, folder_of
from rankscope.record.rows import Rows, rows_of
from rankscope.record.schema import (
    Array,
    is_list,
    schema_of,
    to_arrow,
    to_arrow_lists,
)
from rankscope.record.states import STATE_FILE, pack_state
from rankscope.stats.state import State

_log = logging.getLogger("rankscope")

_MAGIC = b"PAR1"
_MERGE = 4  # row groups of one level that merge into one of the next
_LARGE_GROUP_BYTES = 512 * 2**10  # Arrow bytes from which a row group is not merged
_SKIP = bytes(2**20)
_KEYS = ("step", "rank")  # of few values: they and texts have dictionaries, which slow down numbers


@dataclass(frozen=True, slots=True)
class _Group:
    rows: pa.Table | None  # the rows; None once the group will not be merged
    num_bytes: int
    level: int
    footer: Any  # metadata of a file with this row group only


class GrowingPart:
    """The versions of one Parquet file that grows under its readers; ``grown`` returns the next.

    Some readers open a file more than once: Polars asks for its size, then reads the footer, then
    the data. When the file is replaced in between, they read parts of two versions. So every
    version begins with all bytes of the version before it::

        version 1    PAR1 rows-a footer(a)
        version 2    PAR1 rows-a footer(a) rows-b footer(a, b)

    An old size finds the old footer, an old footer finds the old rows: a reader always sees one
    complete version. Rows are compressed when they are added, and again when small row groups are
    merged. The cost is dead bytes of old footers and merges, 10 to 20 kB per version and table;
    footers are therefore short, without descriptions of the columns.

    Only the rows of row groups that may still be merged are in memory, 2 MB at most.
    """

    def __init__(self) -> None:
        self._groups: tuple[_Group, ...] = ()
        self.size = 0  # bytes of the file

    @property
    def num_bytes(self) -> int:
        """Arrow bytes of all rows, or bytes of the file where these are more."""
        return max(self.size, sum(group.num_bytes for group in self._groups))

    def grown(self, rows: pa.Table) -> tuple["GrowingPart", bytes]:
        """Return the version with more rows, and its bytes after those of this version."""
        groups, rows, level = self._merged(rows)
        written, footer = _write_group(self.size, rows)
        part = GrowingPart()
        part._groups = _forgotten((*groups, _Group(rows, int(rows.nbytes), level, footer)))
        tail = written + _common_footer(part._groups)
        part.size = self.size + len(tail)
        return part, tail

    def _merged(self, rows: pa.Table) -> tuple[tuple[_Group, ...], pa.Table, int]:
        """Merge new rows with the last groups while there are enough of one level."""
        groups = self._groups
        level = 0
        while [g.level for g in groups[1 - _MERGE :]] == [level] * (_MERGE - 1):
            last = groups[1 - _MERGE :]
            size = sum(group.num_bytes for group in last) + rows.nbytes
            kept = [group.rows for group in last if group.rows is not None]
            if size > _LARGE_GROUP_BYTES or len(kept) < len(last):
                break
            groups = groups[: 1 - _MERGE]
            rows = pa.concat_tables([*kept, rows])
            level += 1
        return groups, rows.combine_chunks(), level


def _forgotten(groups: Sequence[_Group]) -> tuple[_Group, ...]:
    """Drop the rows of groups that will not be merged.

    A group merges with exactly three neighbours of the same level, with none of a higher level
    behind it.
    """
    kept = []
    highest = 0
    behind = 0
    for group in reversed(groups):
        behind = behind + 1 if group.level == highest else 1
        may_merge = group.level >= highest and behind < _MERGE
        highest = max(highest, group.level)
        may_merge = may_merge and group.num_bytes < _LARGE_GROUP_BYTES
        kept.append(group if may_merge or group.rows is None else changed(group, rows=None))
    return tuple(reversed(kept))


class _Tail:
    """A file in memory whose first ``size`` bytes exist elsewhere: it keeps the later bytes."""

    closed = False

    def __init__(self, size: int) -> None:
        self._skipped = size
        self._pieces: list[bytes] = []

    def write(self, piece: bytes) -> None:
        """Add bytes."""
        skipped = min(self._skipped, len(piece))
        self._skipped -= skipped
        self._pieces.append(piece[skipped:])

    def flush(self) -> None:
        """Do nothing: all bytes are in memory."""

    def close(self) -> None:
        """Do nothing."""

    def content(self) -> bytes:
        """Return the bytes after the first ``size``."""
        return b"".join(self._pieces)


def _write_group(size: int, rows: pa.Table) -> tuple[bytes, Any]:
    """Write rows as a row group after ``size`` bytes of a file; return their bytes and metadata."""
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
        for start in range(len(_MAGIC), size, len(_SKIP)):  # Arrow counts the bytes itself
            sink.write(_SKIP[: size - start])
        writer.write_table(rows, row_group_size=len(rows))
        written = tail.content()
    return written, footers[0]


def _common_footer(groups: tuple[_Group, ...]) -> bytes:
    """Return a footer of all row groups in order."""
    footer = pq.read_metadata(pa.BufferReader(_footer_file(groups[0].footer)))
    for group in groups[1:]:
        footer.append_row_groups(group.footer)
    return _footer_file(footer)[len(_MAGIC) :]


def _footer_file(footer: Any) -> bytes:
    sink = pa.BufferOutputStream()
    footer.write_metadata_file(sink)
    return bytes(sink.getvalue().to_pybytes())


PART_BYTES = PACE.part_bytes  # bytes after which a part is finished and the next one begins
STATE_BYTES_PER_FLUSH = 4 * 2**20
"""Bytes of the detectors' state per flush on average: after a larger one, flushes leave it out."""
PENDING_BYTES = 32 * 2**20  # of traces that may wait in memory: with more, a flush is due at once
_TRACE_BYTES = 8 * TRACE_WIDTH  # of a row: its sketch, and as much again around it

_WRITE_ORDER = (
    Table.SAMPLES,
    Table.MICRO,
    Table.PAIRS,
    Table.GROUPS,
    Table.DIGESTS,
    Table.TRACES,
    Table.WORKERS,
    Table.STEPS,
)


class RunWriter:
    """Writes one run directory; safe to call from several threads.

    ``add`` only keeps rows in memory; files are written by ``flush``, ``flush_if_due`` and
    ``close``. After a write error the rows are kept, so that a later flush can still write them.

    ``begun``: ``begin_run`` has claimed the directory already, and returned ``info``, which is
    written again with the first flush. Otherwise the directory is claimed here, and ``start`` is
    the initial state of the detectors, if the run continues another.
    """

    def __init__(
        self,
        path: str | Path,
        info: Mapping[str, Any],
        *,
        flush_seconds: float = 10.0,
        start: State | None = None,
        begun: bool = False,
    ) -> None:
        self.path = Path(path)
        self.flush_seconds = min(flush_seconds, PACE.most_flush_seconds)
        self._tables = {
            table: _PartWriter(self.path, self.path / table, columns_of(table))
            for table in _WRITE_ORDER
        }
        self._rolled = {
            name: _PartWriter(self.path, folder_of(self.path, name), columns)
            for name, columns in columns_by_folder().items()
        }
        self._parts = (*self._tables.values(), *self._rolled.values())
        self._rollups = RollupRows()
        self._rows_lock = threading.Lock()
        self._file_lock = threading.RLock()
        self._num_steps = 0
        self._findings: set[str] = set()
        self._num_traced = 0  # rows of traces since the last flush
        self._last_flush: float | None = None
        self._flushes_without_state = 0
        self._closed = False
        self._info = {**info, "versions": {"pyarrow": pa.__version__, **info.get("versions", {})}}
        self._info_due = begun
        if not begun:
            packed = b"" if start is None else pack_state(start)
            self._info = begin_run(self.path, self._info, packed)
        self._place = DirectoryPlace(self.path)

    def add(self, report: StepReport) -> None:
        """Append one step to all tables, in memory."""
        self.add_many([report])

    def add_many(self, reports: Sequence[StepReport]) -> None:
        """Append consecutive steps to all tables, in memory."""
        if not reports:
            return
        rows = rows_of(reports)
        with self._rows_lock:
            if self._closed:
                raise RunError(f"{self.path} is closed: no step can be added to it")
            for table, table_rows in rows.items():
                self._tables[table].append(table_rows)
            for name, bins in self._rollups.add(rows):
                self._rolled[name].append(bins)
            self._num_traced += len(rows.get(Table.TRACES, {}).get("step", ()))
            self._num_steps += len(reports)

    def add_findings(self, findings: Iterable[Finding]) -> None:
        """Append events to ``findings.jsonl`` and write them through at once."""
        found = list(findings)
        lines = [json.dumps(to_plain(finding.to_json())) + "\n" for finding in found]
        if lines:
            with self._file_lock:
                self._follow()
                append(self.path / FINDINGS_FILE, "".join(lines).encode())
                self._findings |= {finding.id for finding in found}

    def describe(self, **facts: Any) -> None:
        """Put facts into ``run.json``, with the next flush."""
        with self._file_lock:
            self._info |= facts
            self._info_due = True

    def flush(self) -> None:
        """Write all rows that were added so far."""
        with self._file_lock:
            with self._rows_lock:
                for part in self._parts:
                    part.stage()
                self._num_traced = 0
            self._follow()
            if self._info_due:
                replace(self.path / INFO_FILE, text_of(self._info))
                self._info_due = False
            for part in self._parts:
                part.write()

    def _follow(self) -> None:
        """Write where the run's directory is now; RunError if another run has taken its place."""
        place = self._place.now()
        if place != self.path:
            _log.warning(
                "the run directory %s has been moved; its record goes on in %s", self.path, place
            )
            self.path = place
            for part in self._parts:
                part.run = place

    @property
    def waiting_bytes(self) -> int:
        """Estimated memory of the rows that are not written yet."""
        return sum(part.waiting_bytes for part in self._parts)

    def flush_if_due(self, now: float | None = None) -> bool:
        """Flush at first, after ``flush_seconds``, or with many traces; return whether it was."""
        now = time.monotonic() if now is None else now
        waits = self._num_traced * _TRACE_BYTES < PENDING_BYTES
        recent = self._last_flush is not None and 0 <= now - self._last_flush < self.flush_seconds
        if recent and waits:
            return False
        self._last_flush = now
        self.flush()
        return True

    def save_state(self, take: Callable[[], State], *, at_end: bool = False) -> None:
        """Write the state of the detectors, a large one not after each flush but ``at_end``."""
        with self._file_lock:
            if self._closed or (self._flushes_without_state > 0 and not at_end):
                self._flushes_without_state -= 1
                return
            content = pack_state(take())
            self._follow()
            replace(self.path / STATE_FILE, content)
            self._flushes_without_state = math.ceil(len(content) / STATE_BYTES_PER_FLUSH) - 1

    def close(self, status: str = "complete", **facts: Any) -> None:
        """Flush, and record the end of the run in ``run.json``. A second call does nothing."""
        with self._file_lock:
            if self._closed:
                return
            self.flush()
            self._info |= {"status": status, "finished": now(), "steps": self._num_steps}
            self._info |= {"findings": len(self._findings), **facts}
            replace(self.path / INFO_FILE, text_of(self._info))
            self._closed = True
            self._place.close()

    @property
    def waiting_steps(self) -> tuple[int, ...]:
        """The steps that are not written yet."""
        return tuple(int(step) for step in self._tables[Table.STEPS].waiting("step"))

    def end_early(self, **facts: Any) -> None:
        """Record in ``run.json`` that the run ends without the rows that are not written yet."""
        with self._file_lock:
            self._info |= {"status": "incomplete", "finished": now()}
            self._info |= {"steps": self._num_steps - len(self.waiting_steps), **facts}
            self._follow()
            try:
                replace(self.path / INFO_FILE, text_of(self._info))
            except RunError:  # no room for a second file
                short = json.dumps(to_plain(self._info), separators=(",", ":"))
                overwrite(self.path / INFO_FILE, short.encode())
            self._closed = True
            self._place.close()


class _PartWriter:
    """The Parquet parts of one table: finished ones, and one that still grows.

    Rows are pending (added), then staged (part of the flush under way), then written.
    """

    def __init__(self, run: Path, folder: Path, columns: Sequence[Column]) -> None:
        self.run = run  # its directory, which may be moved
        self._inside = folder.relative_to(run)
        self._signals = columns
        self._schema = schema_of(columns)
        self._pending: list[Rows] = []
        self._staged: list[Rows] = []
        self._pending_bytes = self._staged_bytes = 0
        self._part = GrowingPart()
        self._number = 0

    def append(self, rows: Rows) -> None:
        """Add rows in memory."""
        self._pending.append(rows)
        self._pending_bytes += _num_bytes(rows)

    @property
    def waiting_bytes(self) -> int:
        """Estimated memory of the rows that are not written yet."""
        return self._pending_bytes + self._staged_bytes

    def waiting(self, name: str) -> Iterator[Any]:
        """Yield a column of the rows that are not written yet."""
        return chain.from_iterable(rows[name] for rows in (*self._staged, *self._pending))

    def stage(self) -> None:
        """Mark all rows added so far for the next write."""
        self._staged += self._pending
        self._staged_bytes += self._pending_bytes
        self._pending = []
        self._pending_bytes = 0

    def write(self) -> None:
        """Write the staged rows into the growing part; on an error they stay staged."""
        if not self._staged:
            return
        try:
            above = (self.run / inside for inside in self._inside.parents[-2::-1])
            for folder in (*above, self._folder):  # but not the run's own directory
                make_folder(folder, folder.parent.stat().st_mode & 0o777)
        except OSError as error:
            raise write_error(self._folder, error) from error
        if self._part.size and not is_file(self._file):  # it was removed
            self._number += 1
            self._part = GrowingPart()
        blocks = self._staged
        columns = [_column([rows[s.name] for rows in blocks], s.dtype) for s in self._signals]
        grown, tail = self._part.grown(pa.table(columns, schema=self._schema))
        replace(self._file, tail, after=self._part.size)
        self._staged = []
        self._staged_bytes = 0
        self._part = grown
        if grown.num_bytes >= PART_BYTES:
            self._number += 1
            self._part = GrowingPart()

    @property
    def _folder(self) -> Path:
        return self.run / self._inside

    @property
    def _file(self) -> Path:
        return self._folder / f"part-{self._number:06d}.parquet"


def _num_bytes(rows: Rows) -> int:
    return sum(
        sum(cell.nbytes for cell in column) if isinstance(column, list) else column.nbytes
        for column in rows.values()
    )


def _column(blocks: list[Array | list[Array]], dtype: DType) -> pa.Array:
    if is_list(dtype):
        return to_arrow_lists([cell for block in blocks for cell in block], dtype)
    return to_arrow(np.concatenate(blocks), dtype)

"""Writing a run directory that other programs may read at any moment.

Every file is written under a hidden name and then renamed over the old one, so whoever opens a
file sees a whole one. The last Parquet part of a table grows at each flush until it is large, and
then stays as it is: few files, and never a row twice or a gap.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rankscope.core.finding import Finding
from rankscope.core.replicas import TRACE_WIDTH
from rankscope.core.signals import DType, Signal, Table, signals
from rankscope.core.state import State
from rankscope.core.step import StepReport
from rankscope.errors import RunError
from rankscope.record.begin import INFO_FILE, begin_run, now, text_of
from rankscope.record.files import append, extend, is_file, replace, to_plain, write_error
from rankscope.record.part import GrowingPart
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

PART_BYTES = 16 * 2**20
"""Bytes after which a part is finished and the next one begins."""
STATE_BYTES_PER_FLUSH = 4 * 2**20
"""Bytes of the detectors' state that are written per flush on average: a larger one is left out in
the flushes that follow."""
PENDING_BYTES = 32 * 2**20
"""Bytes of traces that may wait in memory: with more, a flush is due before its time."""
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

    Args:
        path: The directory; created with its parents. It may exist when it is empty, but for what
            a start that was cut short has left.
        info: What ``run.json`` says about the run: configuration, hosts, versions. Values that
            JSON does not know (numpy, paths) are made plain, numbers that are not finite null.
        flush_seconds: Time between two writes of ``flush_if_due``.
        start: What the detectors remember when the run begins, if it continues another.
        begun: Whether :func:`~rankscope.record.begin.begin_run` has taken the directory already,
            and ``info`` is what it returned; it is written anew with the first flush.

    Raises:
        RunTakenError: Another job has begun a run in it.
        RunError: The directory is not empty, or cannot be created or written.
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
        self.flush_seconds = flush_seconds
        self._tables = {
            table: _PartWriter(self.path, self.path / table, signals(table))
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
        self._num_traced = 0  # rows of traces since the last flush
        self._last_flush: float | None = None
        self._flushes_without_state = 0
        self._closed = False
        self._info = {**info, "versions": {"pyarrow": pa.__version__, **info.get("versions", {})}}
        self._info_due = begun
        if not begun:
            packed = b"" if start is None else pack_state(start)
            self._info = begin_run(self.path, self._info, packed)

    def add(self, report: StepReport) -> None:
        """Append one step to all tables, in memory.

        Raises:
            RunError: The run is closed.
        """
        self.add_many([report])

    def add_many(self, reports: Sequence[StepReport]) -> None:
        """Append consecutive steps to all tables, in memory.

        Raises:
            RunError: The run is closed.
        """
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
        """Append events to ``findings.jsonl`` and write them through at once.

        Raises:
            RunError: They cannot be written; the file is then as it was before.
        """
        lines = [json.dumps(to_plain(finding.to_json())) + "\n" for finding in findings]
        if lines:
            with self._file_lock:
                append(self.path / "findings.jsonl", "".join(lines).encode())

    def flush(self) -> None:
        """Write all rows that were added so far.

        Raises:
            RunError: They cannot be written; what the files held before is untouched.
        """
        with self._file_lock:
            with self._rows_lock:
                for part in self._parts:
                    part.stage()
                self._num_traced = 0
            if self._info_due:
                replace(self.path / INFO_FILE, text_of(self._info))
                self._info_due = False
            for part in self._parts:
                part.write()

    @property
    def waiting_bytes(self) -> int:
        """Memory of the rows that are not written as yet, about."""
        return sum(part.waiting_bytes for part in self._parts)

    def flush_if_due(self, now: float | None = None) -> bool:
        """Flush when ``flush_seconds`` have passed since the last time, or when it is the first.

        Before that, when traces take much memory.

        Args:
            now: Seconds on any clock, the same one in every call; a monotonic one if omitted.

        Returns:
            Whether it was due.

        Raises:
            RunError: As in ``flush``.
        """
        now = time.monotonic() if now is None else now
        waits = self._num_traced * _TRACE_BYTES < PENDING_BYTES
        recent = self._last_flush is not None and 0 <= now - self._last_flush < self.flush_seconds
        if recent and waits:
            return False
        self._last_flush = now
        self.flush()
        return True

    def save_state(self, take: Callable[[], State], *, at_end: bool = False) -> None:
        """Write what the detectors remember, after a flush: a large state not after each.

        Args:
            take: Returns it; called only when it is to be written.
            at_end: Write it in any case.

        Raises:
            RunError: It cannot be written; the file is then as it was before.
            TypeError: It holds something that is neither an array nor plain JSON.
        """
        with self._file_lock:
            if self._closed or (self._flushes_without_state > 0 and not at_end):
                self._flushes_without_state -= 1
                return
            content = pack_state(take())
            replace(self.path / STATE_FILE, content)
            self._flushes_without_state = math.ceil(len(content) / STATE_BYTES_PER_FLUSH) - 1

    def close(self, status: str = "complete", **facts: Any) -> None:
        """Flush, and say in ``run.json`` how the run ended. A second call does nothing.

        Args:
            status: ``complete``, ``interrupted``, ``failed`` or another word for the end.
            facts: What else ``run.json`` says from now on, by name.

        Raises:
            RunError: Something cannot be written; the run is then still open.
        """
        with self._file_lock:
            if self._closed:
                return
            self.flush()
            self._info |= {"status": status, "finished": now(), "steps": self._num_steps}
            self._info |= facts
            replace(self.path / INFO_FILE, text_of(self._info))
            self._closed = True


class _PartWriter:
    """The Parquet parts of one table: finished ones, and one that still grows.

    Rows are pending (added), then staged (part of the flush under way), then written.
    """

    def __init__(self, run: Path, folder: Path, columns: Sequence[Signal]) -> None:
        self._folder = folder
        above = takewhile(lambda path: path != run, folder.parents)
        self._folders = [*reversed([*above]), folder]  # not the run's own: it may have been moved
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
        """Memory of the rows that are not written as yet, about."""
        return self._pending_bytes + self._staged_bytes

    def stage(self) -> None:
        """Mark all rows added so far for the next write."""
        self._staged += self._pending
        self._staged_bytes += self._pending_bytes
        self._pending, self._pending_bytes = [], 0

    def write(self) -> None:
        """Write the staged rows into the growing part; on an error they stay staged."""
        if not self._staged:
            return
        try:
            for folder in self._folders:
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise write_error(self._folder, error) from error
        if self._part.size and not is_file(self._file):  # somebody has removed it
            self._number, self._part = self._number + 1, GrowingPart()
        grown, tail = self._part.grown(self._to_arrow(self._staged))
        extend(self._file, self._part.size, tail)
        self._staged, self._staged_bytes = [], 0
        self._part = grown
        if grown.num_bytes >= PART_BYTES:
            self._number += 1
            self._part = GrowingPart()

    @property
    def _file(self) -> Path:
        return self._folder / f"part-{self._number:06d}.parquet"

    def _to_arrow(self, blocks: list[Rows]) -> pa.Table:
        return pa.table(
            [_column([rows[s.name] for rows in blocks], s.dtype) for s in self._signals],
            schema=self._schema,
        )


def _num_bytes(rows: Rows) -> int:
    return sum(
        sum(cell.nbytes for cell in column) if isinstance(column, list) else column.nbytes
        for column in rows.values()
    )


def _column(blocks: list[Array | list[Array]], dtype: DType) -> pa.Array:
    if is_list(dtype):
        return to_arrow_lists([cell for block in blocks for cell in block], dtype)
    return to_arrow(np.concatenate(blocks), dtype)

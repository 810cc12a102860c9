"""Reading a run directory, finished or still being written."""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rankscope.core.direction import from_upper_triangle
from rankscope.core.finding import Finding
from rankscope.core.signals import DType, Source, Table, signal, signals
from rankscope.core.step import Floats, GatheredStep, Ints
from rankscope.errors import RunError
from rankscope.record.schema import SCHEMA_VERSION, Array, arrow_schema, row_keys, to_numpy

Columns = dict[str, Array]

_LOCAL = tuple(s.name for s in signals(Table.WORKERS, Source.LOCAL))


class Run:
    """A run directory. Open it with :meth:`open`; every call reads the files as they are then.

    Attributes:
        path: The directory.
        info: What ``run.json`` said when the run was opened.
    """

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self.path = path
        self.info = info

    @staticmethod
    def is_run(path: str | Path) -> bool:
        """Return whether a path looks like a run directory: it holds a ``run.json``."""
        return (Path(path) / "run.json").is_file()

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a run directory.

        Raises:
            RunError: There is no such directory, it is not a run, its ``run.json`` is damaged, or
                a newer rankscope wrote it.
        """
        path = Path(path)
        if not path.is_dir():
            raise RunError(f"there is no run directory {path}: check the path")
        if not cls.is_run(path):
            raise RunError(f"{path} is not a run directory: it has no run.json; check the path")
        info = _read_info(path / "run.json")
        version = info["schema_version"]
        if version > SCHEMA_VERSION:
            raise RunError(
                f"{path} was written by a newer rankscope (schema {version}; this one reads up to "
                f"{SCHEMA_VERSION}): upgrade with pip install -U rankscope"
            )
        return cls(path, info)

    @property
    def status(self) -> str:
        """``running`` until the run is closed, also after it was killed; then how it ended."""
        return str(self.info.get("status", "running"))

    @property
    def num_workers(self) -> int:
        """W, as ``run.json`` states it, otherwise as the recorded ranks show it."""
        for name in ("num_workers", "world_size"):
            if isinstance(self.info.get(name), int):
                return int(self.info[name])
        ranks = self.columns(Table.WORKERS, "rank")["rank"]
        return int(ranks.max()) + 1 if len(ranks) else 0

    def table(self, table: Table) -> pa.Table:
        """Return one table, sorted by step, rank and micro-batch.

        A table without files is empty; columns that the files lack are null.

        Raises:
            RunError: A file cannot be read.
        """
        schema = arrow_schema(table)
        parts = [_read_part(file, schema) for file in self._parts(table)]
        rows = pa.concat_tables([schema.empty_table(), *parts])
        return rows.sort_by([(key, "ascending") for key in row_keys(table)])

    def columns(self, table: Table, *names: str) -> Columns:
        """Return columns of one table as numpy arrays ``[rows]``; all of them without names.

        A null is NaN in a float column, ``MISSING_INT`` in an integer one and False in a boolean
        one. A column of lists is an object array of numpy arrays.

        Raises:
            KeyError: There is no such column.
            RunError: A file cannot be read.
        """
        dtypes = {name: signal(table, name).dtype for name in names or _names(table)}
        rows = self.table(table)
        return {name: to_numpy(rows[name], dtype) for name, dtype in dtypes.items()}

    def per_worker(self, name: str) -> tuple[Ints, Floats]:
        """Return a column of the workers table as a matrix.

        Returns:
            The steps ``[T]`` that have rows, and the values ``[T, W]``: NaN where a worker has no
            row or no value.

        Raises:
            KeyError: There is no such column.
            RunError: A file cannot be read.
        """
        signal(Table.WORKERS, name)
        rows = self.table(Table.WORKERS)
        steps_T, at = np.unique(to_numpy(rows["step"], DType.INT), return_inverse=True)
        ranks = to_numpy(rows["rank"], DType.INT)
        width = max(self.num_workers, int(ranks.max(initial=-1)) + 1)
        values_TW = np.full((len(steps_T), width), np.nan)
        values_TW[at, ranks] = to_numpy(rows[name].cast(pa.float64(), safe=False), DType.FLOAT)
        return steps_T, values_TW

    def cosines(self) -> tuple[Ints, Floats]:
        """Return the recorded cosines of all pairs of workers.

        Returns:
            The observed steps ``[T]``, and symmetric matrices ``[T, W, W]`` whose diagonal is 1,
            or NaN for a worker that has no cosine with any other in that step.

        Raises:
            RunError: A file cannot be read.
        """
        rows = self.columns(Table.PAIRS, "step", "cosines")
        num_pairs = max(map(len, rows["cosines"]), default=0)
        width = (1 + math.isqrt(1 + 8 * num_pairs)) // 2 if num_pairs else self.num_workers
        matrices = [from_upper_triangle(values, width) for values in rows["cosines"]]
        return rows["step"], np.array(matrices, np.float64).reshape(-1, width, width)

    def findings(self) -> tuple[Finding, ...]:
        """Return the findings, the last event of each id, in order of first appearance.

        A last line that a kill cut short is ignored.

        Raises:
            RunError: Another line is malformed.
        """
        file = self.path / "findings.jsonl"
        try:
            lines = file.read_bytes().split(b"\n") if file.exists() else [b""]
        except OSError as error:
            raise RunError(f"cannot read {file} ({error.strerror}): check permissions") from error
        latest: dict[str, Finding] = {}
        for number, line in enumerate(lines, start=1):
            try:
                finding = Finding.from_json(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines):  # empty after a last newline, or torn
                    break
                raise RunError(
                    f"{file}, line {number} is not a finding: repair the line or remove it"
                ) from error
            latest[finding.id] = finding
        return tuple(latest.values())

    def iter_gathered(self) -> Iterator[GatheredStep]:
        """Yield the recorded steps as the workers reported them, without sketches.

        Holds about one file of each table in memory at a time. Micro-batches are there in the
        steps that recorded them. Steps that are written meanwhile are left out.

        Raises:
            RunError: A file cannot be read, or a step has no workers.
        """
        steps = self.columns(Table.STEPS, "step", "time", "observed")
        workers = _StepCursor(self._blocks(Table.WORKERS))
        samples = _StepCursor(self._blocks(Table.SAMPLES))
        micro = _StepCursor(self._blocks(Table.MICRO))
        for step, time, observed in zip(*(steps[name].tolist() for name in steps), strict=True):
            local = workers.take(step)
            if local is None:
                raise RunError(f"{self.path} lacks the workers of step {step}: the run is damaged")
            yield _gathered(step, time, observed, local, samples.take(step), micro.take(step))

    def _parts(self, table: Table) -> list[Path]:
        return sorted((self.path / table).glob("part-*.parquet"))

    def _blocks(self, table: Table) -> Iterator[Columns]:
        """Yield a table in the order of its files, in blocks of rows."""
        schema = arrow_schema(table)
        for file in self._parts(table):
            for batch in _read_part(file, schema).to_batches(max_chunksize=8192):
                block = pa.table(batch)
                yield {s.name: to_numpy(block[s.name], s.dtype) for s in signals(table)}


class _StepCursor:
    """Walks through blocks of rows that are ordered by step, one step at a time."""

    def __init__(self, blocks: Iterable[Columns]) -> None:
        self._blocks = iter(blocks)
        self._rows: Columns = {}
        self._at = 0

    def take(self, step: int) -> Columns | None:
        """Return the rows of one step, None if there are none. Steps must be asked in order."""
        taken: list[Columns] = []
        while self._at < len(self._rows.get("step", ())) or self._next_block():
            steps = self._rows["step"]
            start, end = np.searchsorted(steps, [step, step + 1])
            if end > start:
                taken.append({name: values[start:end] for name, values in self._rows.items()})
            self._at = int(end)
            if end < len(steps):
                break
        if len(taken) < 2:
            return taken[0] if taken else None
        return {name: np.concatenate([part[name] for part in taken]) for name in taken[0]}

    def _next_block(self) -> bool:
        self._rows, self._at = next(self._blocks, {}), 0
        return bool(self._rows)


def _gathered(
    step: int,
    time: float,
    observed: bool,
    local: Columns,
    samples: Columns | None,
    micro: Columns | None,
) -> GatheredStep:
    width = len(local["rank"])
    samples_of: list[Ints] = [np.empty(0, np.int64) for _ in range(width)]
    if samples is not None:
        for rank, values in zip(samples["rank"], samples["samples"], strict=True):
            samples_of[rank] = values
    losses: tuple[Floats, ...] = ()
    weights: tuple[Floats, ...] = ()
    if micro is not None:
        ends = np.searchsorted(micro["rank"], np.arange(1, width))
        losses = tuple(np.split(micro["loss"], ends))
        weights = tuple(np.split(micro["loss_weight"], ends))
    return GatheredStep(
        step=step,
        time=time,
        observed=observed,
        workers={name: local[name] for name in _LOCAL},
        sketches_WK=None,
        samples=tuple(samples_of),
        micro_losses=losses,
        micro_weights=weights,
    )


def _names(table: Table) -> tuple[str, ...]:
    return tuple(s.name for s in signals(table))


def _read_info(file: Path) -> dict[str, Any]:
    try:
        info = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read as JSON ({error}): the run is damaged") from error
    if not isinstance(info, dict) or not isinstance(info.get("schema_version"), int):
        raise RunError(f"{file} states no schema_version: it is not the run.json of a run")
    return info


def _read_part(file: Path, schema: pa.Schema) -> pa.Table:
    """Read one Parquet file from a single open handle, shaped as the schema says."""
    try:
        with file.open("rb") as handle:
            rows = pq.read_table(handle)
        columns = [
            rows[field.name].cast(field.type)
            if field.name in rows.column_names
            else pa.nulls(len(rows), field.type)
            for field in schema
        ]
        return pa.table(columns, schema=schema)
    except (OSError, pa.ArrowException) as error:
        raise RunError(f"cannot read {file}: it is damaged; remove it to read the rest") from error

"""The synthetic run of ``live_page.py``: W workers and T steps through the real schema.

It has the tables, columns, part sizes and row groups of a recorded run, and its roll-ups come from
the writer's own code. Its noise repeats every few steps and has few different values, so that the
largest run needs little disk; the means in its roll-ups compress no better than real ones.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rankscope.bus.evidence import Column, DType, Table
from rankscope.evidence import columns_of
from rankscope.record.begin import SCHEMA_VERSION
from rankscope.record.rollups import RollupRows, columns_by_folder, folder_of
from rankscope.record.schema import arrow_schema, schema_of, to_arrow
from rankscope.record.writer import PART_BYTES, GrowingPart

Columns = Mapping[str, NDArray[Any]]

FLUSH = 10
"""Steps that are written at once, as one row group."""
BLOCK_ROWS = 20 * 1024
"""Rows of the workers table that are made at once; their noise repeats in the next block."""
EIGHT = (
    "loss",
    "grad_norm",
    "cosine_rest",
    "step_seconds",
    "overhead_seconds",
    "grad_max",
    "reduced_norm",
    "lr",
)
VARYING = {"step", "rank", "loss_sem", "num_samples", *EIGHT}
GROUPS = ("embedding", "layers.0", "layers.1", "head")
OBSERVED = 16
"""Gradients of groups are recorded in steps that are multiples of this."""
SPIKE_STEP_SHARE = 0.37
SPIKE = 50.0
BATCH = 2


def make_run(path: Path, num_workers: int, num_steps: int) -> None:
    """Write a run."""
    path.mkdir(parents=True)
    info = {
        "schema_version": SCHEMA_VERSION,
        "status": "complete",
        "num_workers": num_workers,
        "world_size": num_workers,
        "steps": num_steps,
    }
    (path / "run.json").write_text(json.dumps(info))
    group_rows = max(FLUSH * num_workers, 640)
    _write_table(path, Table.STEPS, _step_blocks(num_workers, num_steps), 4096)
    _write_table(path, Table.SAMPLES, _sample_blocks(num_workers, num_steps), group_rows)
    _write_table(path, Table.GROUPS, _group_blocks(num_workers, num_steps), group_rows)
    if num_workers <= 64:
        _write_table(path, Table.PAIRS, _pair_blocks(num_workers, num_steps), FLUSH)
    _write_workers(path, num_workers, num_steps)


def _write_workers(path: Path, num_workers: int, num_steps: int) -> None:
    """Write the workers table, and the roll-ups that the writer makes of its rows."""
    rollups = RollupRows()
    parts = {
        name: _Part(folder_of(path, name), columns) for name, columns in columns_by_folder().items()
    }
    values = _Values(num_workers, num_steps)

    def blocks() -> Iterator[pa.Table]:
        for first, last in _blocks(num_workers, num_steps):
            rows = values.rows(first, last)
            for start in range(0, len(rows["step"]), num_workers):
                step = {name: column[start : start + num_workers] for name, column in rows.items()}
                drawn = BATCH * num_workers
                ids = np.arange(drawn) + int(step["step"][0]) * drawn
                samples: dict[str, Any] = {"step": step["step"][:1], "samples": [ids]}
                for name, bins in rollups.add({Table.WORKERS: step, Table.SAMPLES: samples}):
                    parts[name].append(bins)
            yield values.table(rows)

    _write_table(path, Table.WORKERS, blocks(), max(FLUSH * num_workers, 640))
    for part in parts.values():
        part.finish()


class _Part:
    """The parts of a roll-up, a row group per bin as in the writer, but each file written once."""

    def __init__(self, folder: Path, columns: Sequence[Column]) -> None:
        self._folder, self._part, self._number = folder, GrowingPart(), 0
        self._content: list[bytes] = []
        self._columns, self._schema = columns, schema_of(columns)

    def append(self, rows: Mapping[str, Any]) -> None:
        columns = [to_arrow(rows[s.name], s.dtype) for s in self._columns]
        self._part, tail = self._part.grown(pa.table(columns, schema=self._schema))
        self._content.append(tail)
        if self._part.num_bytes >= PART_BYTES:
            self.finish()

    def finish(self) -> None:
        if self._content:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = self._folder / f"part-{self._number:06d}.parquet"
            file.write_bytes(b"".join(self._content))
            self._part, self._content, self._number = GrowingPart(), [], self._number + 1


class _Values:
    """Rows of the workers table: a drift over steps, and noise that repeats."""

    def __init__(self, num_workers: int, num_steps: int) -> None:
        rng = np.random.default_rng(0)
        self._num_workers, self._num_steps = num_workers, num_steps
        size = BLOCK_ROWS // num_workers, num_workers
        self._noise_TW = np.round(rng.normal(size=size) * 64) / 64
        self._same = {
            s.name: to_arrow(_constant(s.dtype, BLOCK_ROWS), s.dtype)
            for s in columns_of(Table.WORKERS)
            if s.name not in VARYING
        }
        self._spike = int(SPIKE_STEP_SHARE * num_steps), num_workers // 2

    def rows(self, first: int, last: int) -> Columns:
        """Return the columns that have values, for the steps from ``first`` to before ``last``."""
        steps_T = np.arange(first, last)
        noise_TW = self._noise_TW[: len(steps_T)]
        drift = np.exp(-3 * first / self._num_steps)
        loss_TW = 2.0 + 2 * drift + noise_TW / 4
        if first <= self._spike[0] < last:
            loss_TW = loss_TW.copy()
            loss_TW[self._spike[0] - first, self._spike[1]] = SPIKE
        norm_TW = 1.0 + drift + np.abs(noise_TW) / 8
        seconds_TW = 0.5 + np.abs(noise_TW) / 64
        floats = {
            "loss": loss_TW,
            "loss_sem": 0.25 + 0 * noise_TW,
            "grad_norm": norm_TW,
            "grad_max": norm_TW / 16,
            "reduced_norm": 0 * noise_TW + norm_TW.mean() / 4,
            "cosine_rest": 0.5 + noise_TW / 16,
            "lr": 0 * noise_TW + drift / 1024,
            "step_seconds": seconds_TW,
            "overhead_seconds": seconds_TW / 256,
        }
        count = noise_TW.size
        return {
            "step": np.repeat(steps_T, self._num_workers),
            "rank": np.tile(np.arange(self._num_workers), len(steps_T)),
            **{
                s.name: floats[s.name].ravel() if s.name in floats else _constant(s.dtype, count)
                for s in columns_of(Table.WORKERS)[2:]
            },
            "num_samples": np.full(count, BATCH),
        }

    def table(self, rows: Columns) -> pa.Table:
        """Return rows as Arrow."""
        count = len(rows["step"])
        columns = [
            self._same[s.name].slice(0, count)
            if s.name in self._same
            else to_arrow(rows[s.name], s.dtype)
            for s in columns_of(Table.WORKERS)
        ]
        return pa.table(columns, schema=arrow_schema(Table.WORKERS))


def _constant(dtype: DType, count: int) -> NDArray[Any]:
    if dtype is DType.FLOAT:
        return np.full(count, np.nan)
    return np.zeros(count, np.bool_ if dtype is DType.BOOL else np.int64)


def _step_blocks(num_workers: int, num_steps: int) -> Iterator[pa.Table]:
    """Yield the steps table; its numbers are of the size of those that the workers' rows give."""
    steps_T = np.arange(num_steps)
    noise_T = np.random.default_rng(1).normal(size=num_steps)
    drift_T = np.exp(-3 * steps_T / num_steps)
    drawn_T = np.full(num_steps, BATCH * num_workers)
    values = {
        "step": steps_T,
        "time": 1.7e9 + 0.5 * steps_T,
        "observed": np.ones(num_steps, bool),
        "loss_mean": 2.0 + 2 * drift_T + noise_T / 64,
        "loss_std": 0.25 + noise_T / 256,
        "loss_range": 1.0 + noise_T / 64,
        "loss_std_expected": np.full(num_steps, 0.25),
        "grad_norm_mean": 1.1 + drift_T,
        "grad_norm_std": 0.075 + noise_T / 1024,
        "cosine_mean": 0.25 + noise_T / 64,
        "grad_norm_reduced": 0.5 + drift_T / 2,
        "cosine_weighted": 0.25 + noise_T / 64,
        "cosine_min": 0.1 + noise_T / 64,
        "directions_undefined": np.zeros(num_steps),
        "samples_drawn": drawn_T,
        "samples_distinct": drawn_T,
        "interval": np.ones(num_steps, np.int64),
        "overhead_seconds": 0.002 + np.abs(noise_T) / 2048,
    }
    columns = [
        to_arrow(values.get(s.name, np.full(num_steps, np.nan)), s.dtype)
        for s in columns_of(Table.STEPS)
    ]
    yield pa.table(columns, schema=arrow_schema(Table.STEPS))


def _sample_blocks(num_workers: int, num_steps: int) -> Iterator[pa.Table]:
    for first, last in _blocks(num_workers, num_steps):
        count = (last - first) * num_workers
        ids = np.arange(first * num_workers * BATCH, last * num_workers * BATCH)
        samples = pa.ListArray.from_arrays(
            pa.array(np.arange(0, (count + 1) * BATCH, BATCH, dtype=np.int32)), pa.array(ids)
        )
        steps = np.repeat(np.arange(first, last), num_workers)
        ranks = np.tile(np.arange(num_workers), last - first)
        yield pa.table([steps, ranks, samples], schema=arrow_schema(Table.SAMPLES))


def _group_blocks(num_workers: int, num_steps: int) -> Iterator[pa.Table]:
    size = num_workers * len(GROUPS)
    noise = np.round(np.random.default_rng(2).normal(size=4 * size) * 64) / 1024
    for first in range(0, num_steps, 4 * OBSERVED):
        steps_T = np.arange(first, min(first + 4 * OBSERVED, num_steps), OBSERVED)
        count = len(steps_T) * size
        names = np.tile(np.array(GROUPS, object), num_workers * len(steps_T))
        values = {
            "step": np.repeat(steps_T, size),
            "rank": np.tile(np.repeat(np.arange(num_workers), len(GROUPS)), len(steps_T)),
            "group": pa.array(names, pa.string()),
            "grad_norm": 0.5 + noise[:count],
            "cosine_rest": 0.5 - noise[:count],
            "reduction_residual": np.full(count, 2.0**-24),
            "accumulator_change": np.zeros(count),
        }
        columns = [values[column.name] for column in columns_of(Table.GROUPS)]
        yield pa.table(columns, schema=arrow_schema(Table.GROUPS))


def _pair_blocks(num_workers: int, num_steps: int) -> Iterator[pa.Table]:
    size = num_workers * (num_workers - 1) // 2
    rng = np.random.default_rng(3)
    for first in range(0, num_steps, FLUSH):
        steps_T = np.arange(first, min(first + FLUSH, num_steps))
        offsets = pa.array(np.arange(len(steps_T) + 1, dtype=np.int32) * size)
        flat = (0.25 + rng.normal(size=len(steps_T) * size) / 64).astype(np.float32)
        cosines = pa.ListArray.from_arrays(offsets, pa.array(flat))
        yield pa.table([steps_T, cosines], schema=arrow_schema(Table.PAIRS))


def _blocks(num_workers: int, num_steps: int) -> Iterator[tuple[int, int]]:
    size = BLOCK_ROWS // num_workers
    for first in range(0, num_steps, size):
        yield first, min(first + size, num_steps)


def _write_table(path: Path, table: Table, blocks: Iterator[pa.Table], group_rows: int) -> None:
    """Write blocks of rows as parts of about 16 MiB."""
    (path / table).mkdir()
    writer: Any = None
    written, number = 0, 0
    for block in blocks:
        if writer is None:
            writer = pq.ParquetWriter(
                path / table / f"part-{number:06d}.parquet",
                block.schema,
                compression="zstd",
                store_schema=False,
                write_statistics=["step", "rank"],
            )
            written, number = 0, number + 1
        writer.write_table(block, row_group_size=group_rows)
        written += block.nbytes
        if written >= PART_BYTES:
            writer.close()
            writer = None
    if writer is not None:
        writer.close()

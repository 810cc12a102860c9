"""The rows that steps add to the tables of a run, and a recorded run as a stream of its steps."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from rankscope.bus.evidence import Source, Table
from rankscope.bus.replicas import StateDifference, StateKind, TensorTrace
from rankscope.bus.step import (
    MAX_PAIRED_WORKERS,
    GatheredStep,
    StepReport,
    as_floats,
    has_groups,
    has_micro_batches,
    known_micro_norms,
    unless_unknown,
)
from rankscope.errors import RunError
from rankscope.evidence import columns_of
from rankscope.record.schema import Array, arrow_schema, to_numpy
from rankscope.record.tables import Columns, from_step, parts_in, read_part, read_pieces
from rankscope.stats.arrays import Floats, Ints
from rankscope.stats.direction import from_upper_triangle, upper_triangle

Rows = Mapping[str, Array | list[Array]]  # by column; a list column has an array per row


def rows_of(reports: Sequence[StepReport]) -> dict[Table, Rows]:
    """Return the rows of steps by table, as copies; tables without rows are left out."""
    grouped = [report for report in reports if has_groups(report.gathered)]
    rows = {Table.STEPS: _step_rows(reports), Table.WORKERS: _worker_rows(reports)}
    if grouped:
        rows[Table.GROUPS] = _group_rows(grouped)
    rows[Table.SAMPLES] = _sample_rows(reports)
    for table, rows_of_step in _RARE.items():
        blocks = [block for report in reports if len((block := rows_of_step(report))["step"])]
        if blocks:
            rows[table] = _joined(blocks)
    return {table: table_rows for table, table_rows in rows.items() if len(table_rows["step"])}


def _joined(blocks: Sequence[Rows]) -> Rows:
    """Return the rows of several blocks, one after the other."""
    if len(blocks) == 1:
        return blocks[0]
    columns = {name: [block[name] for block in blocks] for name in blocks[0]}
    return {
        name: [cell for part in parts for cell in part]
        if isinstance(parts[0], list)
        else np.concatenate(parts)
        for name, parts in columns.items()
    }


def _step_rows(reports: Sequence[StepReport]) -> Rows:
    rows: dict[str, Array] = {
        "step": np.array([report.gathered.step for report in reports]),
        "time": np.array([report.gathered.time for report in reports]),
        "observed": np.array([report.gathered.observed for report in reports]),
    }
    for signal in columns_of(Table.STEPS, Source.DERIVED):
        rows[signal.name] = np.array([report.values[signal.name] for report in reports])
    return rows


def _worker_rows(reports: Sequence[StepReport]) -> Rows:
    steps = [report.gathered for report in reports]
    widths = [step.num_workers for step in steps]
    rows: dict[str, Array] = {
        "step": np.repeat([step.step for step in steps], widths),
        "rank": np.concatenate([np.arange(width) for width in widths]),
    }
    for signal in columns_of(Table.WORKERS, Source.LOCAL):
        rows[signal.name] = np.concatenate([step.workers[signal.name] for step in steps])
    for signal in columns_of(Table.WORKERS, Source.DERIVED):
        rows[signal.name] = np.concatenate([report.derived[signal.name] for report in reports])
    return rows


def _micro_rows(report: StepReport) -> Rows:
    step = report.gathered
    losses = step.micro_losses
    if not has_micro_batches(step):
        return {"step": np.empty(0, np.int64)}
    lengths = [len(worker) for worker in losses]
    unknown = (np.full(sum(lengths), np.nan),)
    return {
        "step": np.full(sum(lengths), step.step),
        "rank": np.repeat(np.arange(len(losses)), lengths),
        "micro": np.concatenate([np.arange(length) for length in lengths]),
        "loss": np.concatenate(losses),
        "loss_weight": np.concatenate(step.micro_weights),
        "grad_norm": np.concatenate(known_micro_norms(step) or unknown),
        "loss_scale": np.concatenate(step.micro_scales or unknown),
    }


def _sample_rows(reports: Sequence[StepReport]) -> Rows:
    drawn = [
        (report.gathered.step, rank, worker)
        for report in reports
        for rank, worker in enumerate(report.gathered.samples)
        if len(worker)
    ]
    return {
        "step": np.array([step for step, _, _ in drawn], np.int64),
        "rank": np.array([rank for _, rank, _ in drawn], np.int64),
        "samples": [np.array(worker) for _, _, worker in drawn],
    }


def _pair_row(report: StepReport) -> Rows:
    cosines_WW = report.cosines_WW
    if cosines_WW is None or not 2 <= len(cosines_WW) <= MAX_PAIRED_WORKERS:
        return {"step": np.empty(0, np.int64)}
    return {"step": np.array([report.gathered.step]), "cosines": [upper_triangle(cosines_WW)]}


def _group_rows(reports: Sequence[StepReport]) -> Rows:
    steps = [report.gathered for report in reports]
    shapes = [(step.num_workers, len(step.groups)) for step in steps]
    names = {step.groups: np.array(step.groups, object) for step in steps}
    return {
        "step": np.repeat([step.step for step in steps], [w * g for w, g in shapes]),
        "rank": np.concatenate([np.arange(w).repeat(g) for w, g in shapes]),
        "group": np.concatenate([np.tile(names[step.groups], step.num_workers) for step in steps]),
        "grad_norm": _flat([step.group_norms_WG for step in steps], shapes),
        "cosine_rest": _flat([report.group_cosine_rest_WG for report in reports], shapes),
        "reduction_residual": _flat([step.residuals_WG for step in steps], shapes),
        "accumulator_change": _flat([step.accumulator_changes_WG for step in steps], shapes),
    }


def _flat(blocks: Sequence[Floats | None], shapes: Sequence[tuple[int, int]]) -> Array:
    """Return matrices of these shapes as one flat array; NaN in place of None."""
    return np.concatenate(
        [
            np.full(width * groups, np.nan) if block is None else block.ravel()
            for block, (width, groups) in zip(blocks, shapes, strict=True)
        ]
    )


def _digest_rows(report: StepReport) -> Rows:
    step = report.gathered
    width = step.num_workers
    count = len(step.differences)
    if not count:
        return {"step": np.empty(0, np.int64)}
    return {
        "step": np.full(width * count, step.step),
        "rank": np.repeat(np.arange(width), count),
        "kind": np.tile(np.array([str(d.kind) for d in step.differences], object), width),
        "name": np.tile(np.array([d.name for d in step.differences], object), width),
        "digest": np.stack([d.digests_W for d in step.differences], axis=1).ravel(),
        "unchanged": np.stack([d.unchanged_W for d in step.differences], axis=1).ravel(),
    }


def _trace_rows(report: StepReport) -> Rows:
    trace = report.gathered.trace
    step = report.gathered.step
    if trace is None:
        return {"step": np.empty(0, np.int64)}
    blocks = [_trace_block(trace, step)]
    if trace.initial is not None:
        blocks.insert(0, _trace_block(trace.initial, step - 1))
    return _joined(blocks)


def _trace_block(trace: TensorTrace, step: int) -> Rows:
    """Return the rows of the model's tensors after ``step``; without a norm a sketch is empty."""
    known = np.isfinite(trace.norms_N).tolist()
    nothing = trace.sketches_NK[0, :0] if len(known) else np.empty(0, np.float32)
    return {
        "step": np.full(len(trace.names), step),
        "kind": np.array([str(kind) for kind in trace.kinds], object),
        "name": np.array(trace.names, object),
        "digest": trace.digests_N,
        "norm": trace.norms_N,
        "sketch": [
            cell if each else nothing for cell, each in zip(trace.sketches_NK, known, strict=True)
        ],
    }


_RARE = {
    Table.MICRO: _micro_rows,
    Table.PAIRS: _pair_row,
    Table.DIGESTS: _digest_rows,
    Table.TRACES: _trace_rows,
}


_LOCAL = tuple(s.name for s in columns_of(Table.WORKERS, Source.LOCAL))
_DERIVED = tuple(s.name for s in columns_of(Table.WORKERS, Source.DERIVED))
_VALUES = columns_of(Table.STEPS, Source.DERIVED)
_OTHERS = (Table.WORKERS, Table.SAMPLES, Table.MICRO, Table.PAIRS, Table.GROUPS, Table.DIGESTS)

_BLOCK_ROWS = 8192
_MICRO = (("loss", False), ("loss_weight", False), ("grad_norm", True), ("loss_scale", True))
_GROUP_COLUMNS = ("grad_norm", "cosine_rest", "reduction_residual", "accumulator_change")

StepRows = Mapping[Table, Columns | None]  # of one step in every table but ``steps``; None: no rows


def read_reports(run: Path, first_step: int) -> Iterator[StepReport]:
    """Yield the recorded steps in order, with all values of their rows.

    They equal, bit for bit, the live results of :func:`rankscope.bus.step.as_recorded`. About one
    file of each table is in memory at a time; steps written meanwhile are left out.
    """
    last_step = _last_step_of(run)
    if last_step is None:
        return
    cursors = {table: _StepCursor(_blocks_of(run, table, first_step)) for table in _OTHERS}
    for block in _blocks_of(run, Table.STEPS, first_step):
        values = {s.name: as_floats(block[s.name]).tolist() for s in _VALUES}
        keys = zip(*(block[name].tolist() for name in ("step", "time", "observed")), strict=True)
        for row, (step, time, observed) in enumerate(keys):
            if step > last_step:
                return
            if step < first_step:
                continue
            rows = {table: cursor.take(step) for table, cursor in cursors.items()}
            value = {name: column[row] for name, column in values.items()}
            try:
                yield _report(step, time, observed, value, rows)
            except (ValueError, IndexError, KeyError) as error:
                raise RunError(f"{run}: the rows of step {step} are damaged ({error})") from error


class _StepCursor:
    """Walks through blocks of rows that are ordered by step, one step at a time."""

    def __init__(self, blocks: Iterable[Columns]) -> None:
        self._blocks = iter(blocks)
        self._rows: Columns = {}
        self._at = 0

    def take(self, step: int) -> Columns | None:
        """Return the rows of one step, None without any; call it in the order of steps."""
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
        self._rows = next(self._blocks, {})
        self._at = 0
        return bool(self._rows)


def _report(
    step: int, time: float, observed: bool, values: Mapping[str, float], rows: StepRows
) -> StepReport:
    local = rows[Table.WORKERS]
    if local is None:
        raise ValueError("it lacks the workers")
    width = len(local["rank"])
    losses, weights, norms, scales = _micro(rows[Table.MICRO], width)
    groups, norms_WG, cosines_WG, residuals_WG, changes_WG = _groups(rows[Table.GROUPS], width)
    interval = values["interval"]
    gathered = GatheredStep(
        step=step,
        time=time,
        observed=observed,
        workers={name: local[name] for name in _LOCAL},
        sketches_WK=None,
        samples=_samples(rows[Table.SAMPLES], width),
        micro_losses=losses,
        micro_weights=weights,
        micro_norms=norms,
        micro_scales=scales,
        differences=_differences(rows[Table.DIGESTS], width),
        groups=groups,
        group_norms_WG=norms_WG,
        residuals_WG=residuals_WG,
        accumulator_changes_WG=changes_WG,
        interval=int(interval) if np.isfinite(interval) else 1,
    )
    derived = {name: local[name] for name in _DERIVED}
    pairs = rows[Table.PAIRS]
    cosines_WW = None if pairs is None else from_upper_triangle(pairs["cosines"][0], width)
    return StepReport(gathered, values, derived, cosines_WW, cosines_WG)


def _samples(rows: Columns | None, width: int) -> tuple[Ints, ...]:
    samples_of: list[Ints] = [np.empty(0, np.int64) for _ in range(width)]
    if rows is not None:
        for rank, values in zip(rows["rank"], rows["samples"], strict=True):
            samples_of[rank] = values
    return tuple(samples_of)


def _micro(rows: Columns | None, width: int) -> tuple[tuple[Floats, ...], ...]:
    """Return losses, weights, gradient norms and multipliers of each worker's micro-batches."""
    if rows is None:
        return (), (), (), ()
    ends = np.searchsorted(rows["rank"], np.arange(1, width))
    losses, weights, norms, scales = (
        () if optional and np.isnan(rows[name]).all() else tuple(np.split(rows[name], ends))
        for name, optional in _MICRO
    )
    return losses, weights, norms, scales


def _differences(rows: Columns | None, width: int) -> tuple[StateDifference, ...]:
    if rows is None:
        return ()
    digests_WD = rows["digest"].reshape(width, -1)
    unchanged_WD = rows["unchanged"].reshape(width, -1)
    return tuple(
        StateDifference(
            StateKind(rows["kind"][d]), rows["name"][d], digests_WD[:, d], unchanged_WD[:, d]
        )
        for d in range(digests_WD.shape[1])
    )


def _groups(
    rows: Columns | None, width: int
) -> tuple[tuple[str, ...], Floats | None, Floats | None, Floats | None, Floats | None]:
    """Return the groups' names ``[G]``, and four columns by worker and group."""
    if rows is None:
        return (), None, None, None, None
    norms_WG, *others = (rows[name].reshape(width, -1) for name in _GROUP_COLUMNS)
    groups = tuple(rows["group"][: norms_WG.shape[1]].tolist())
    cosines_WG, residuals_WG, changes_WG = map(unless_unknown, others)
    return groups, norms_WG, cosines_WG, residuals_WG, changes_WG


def _blocks_of(run: Path, table: Table, first_step: int) -> Iterator[Columns]:
    """Yield a table in blocks of numpy columns; row groups before ``first_step`` are left out."""
    schema = arrow_schema(table)
    for file in parts_in(run / table):
        for rows in read_pieces(file, schema, from_step(first_step)):
            for block in map(pa.table, rows.to_batches(_BLOCK_ROWS)):
                yield {s.name: to_numpy(block[s.name], s.dtype) for s in columns_of(table)}


def _last_step_of(run: Path) -> int | None:
    """Return the last step whose rows are all on disk, None without any."""
    schema = pa.schema([arrow_schema(Table.STEPS).field("step")])
    for file in reversed(parts_in(run / Table.STEPS)):
        steps = read_part(file, schema)["step"]
        if len(steps):
            return int(steps[-1].as_py())
    return None

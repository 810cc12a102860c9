"""The rows that steps add to the tables of a run."""

from collections.abc import Mapping, Sequence

import numpy as np

from rankscope.bus.evidence import Source, Table
from rankscope.bus.replicas import TensorTrace
from rankscope.bus.step import (
    MAX_PAIRED_WORKERS,
    GatheredStep,
    StepReport,
    has_micro_batches,
    known_micro_norms,
)
from rankscope.evidence import columns_of
from rankscope.record.schema import Array
from rankscope.stats.arrays import Floats
from rankscope.stats.direction import upper_triangle

Rows = Mapping[str, Array | list[Array]]
"""Rows by column: an array, or for a column of lists one array per row."""


def rows_of(reports: Sequence[StepReport]) -> dict[Table, Rows]:
    """Return the rows of steps by table, as copies; tables without rows are left out."""
    grouped = [report for report in reports if _has_groups(report.gathered)]
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
    losses = report.gathered.micro_losses
    if not has_micro_batches(report.gathered):
        return {"step": np.empty(0, np.int64)}
    lengths = [len(worker) for worker in losses]
    return {
        "step": np.full(sum(lengths), report.gathered.step),
        "rank": np.repeat(np.arange(len(losses)), lengths),
        "micro": np.concatenate([np.arange(length) for length in lengths]),
        "loss": np.concatenate(losses),
        "loss_weight": np.concatenate(report.gathered.micro_weights),
        "grad_norm": _micro_norms(report.gathered, lengths),
        "loss_scale": _micro_scales(report.gathered, lengths),
    }


def _micro_norms(step: GatheredStep, lengths: list[int]) -> Array:
    norms = known_micro_norms(step)
    return np.concatenate(norms) if norms else np.full(sum(lengths), np.nan)


def _micro_scales(step: GatheredStep, lengths: list[int]) -> Array:
    return np.concatenate(step.micro_scales) if step.micro_scales else np.full(sum(lengths), np.nan)


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


def _has_groups(step: GatheredStep) -> bool:
    return step.group_norms_WG is not None and len(step.groups) >= 2


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
    rows: dict[str, Array | list[Array]] = {
        name: np.concatenate([block[name] for block in blocks])
        for name in ("step", "kind", "name", "digest", "norm")
    }
    rows["sketch"] = [cell for block in blocks for cell in block["sketch"]]
    return rows


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

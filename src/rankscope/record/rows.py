"""The rows that one step adds to the tables of a run."""

from collections.abc import Mapping

import numpy as np

from rankscope.core.direction import upper_triangle
from rankscope.core.recorded import MAX_PAIRED_WORKERS, has_micro_batches, known_micro_norms
from rankscope.core.signals import Source, Table, signals
from rankscope.core.step import GatheredStep, StepReport
from rankscope.core.trace import Trace
from rankscope.record.schema import Array

Rows = Mapping[str, Array | list[Array]]
"""Rows by column: an array, or for a column of lists one array per row."""


def rows_of(report: StepReport) -> dict[Table, Rows]:
    """Return the rows of one step by table, as copies; tables without rows are left out."""
    rows = {
        Table.STEPS: _step_row(report),
        Table.WORKERS: _worker_rows(report),
        Table.MICRO: _micro_rows(report),
        Table.SAMPLES: _sample_rows(report),
        Table.PAIRS: _pair_row(report),
        Table.GROUPS: _group_rows(report),
        Table.DIGESTS: _digest_rows(report),
        Table.TRACES: _trace_rows(report),
    }
    return {table: table_rows for table, table_rows in rows.items() if len(table_rows["step"])}


def _step_row(report: StepReport) -> Rows:
    step = report.gathered
    keys = {"step": step.step, "time": step.time, "observed": step.observed}
    names = (signal.name for signal in signals(Table.STEPS, Source.DERIVED))
    return {name: np.array([v]) for name, v in keys.items()} | {
        name: np.array([report.values[name]]) for name in names
    }


def _worker_rows(report: StepReport) -> Rows:
    step = report.gathered
    rows: dict[str, Array] = {
        "step": np.full(step.num_workers, step.step),
        "rank": np.arange(step.num_workers),
    }
    for signal in signals(Table.WORKERS, Source.LOCAL, Source.DERIVED):
        values = step.workers if signal.source is Source.LOCAL else report.derived
        rows[signal.name] = np.array(values[signal.name])
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


def _sample_rows(report: StepReport) -> Rows:
    samples = report.gathered.samples
    ranks = [rank for rank, worker in enumerate(samples) if len(worker)]
    return {
        "step": np.full(len(ranks), report.gathered.step),
        "rank": np.array(ranks, np.int64),
        "samples": [np.array(samples[rank]) for rank in ranks],
    }


def _pair_row(report: StepReport) -> Rows:
    cosines_WW = report.cosines_WW
    if cosines_WW is None or not 2 <= len(cosines_WW) <= MAX_PAIRED_WORKERS:
        return {"step": np.empty(0, np.int64)}
    return {"step": np.array([report.gathered.step]), "cosines": [upper_triangle(cosines_WW)]}


def _group_rows(report: StepReport) -> Rows:
    step = report.gathered
    if step.group_norms_WG is None or len(step.groups) < 2:
        return {"step": np.empty(0, np.int64)}
    num_workers, num_groups = step.group_norms_WG.shape
    cosines_WG = report.group_cosine_rest_WG
    if cosines_WG is None:
        cosines_WG = np.full((num_workers, num_groups), np.nan)
    residuals_WG = step.residuals_WG
    if residuals_WG is None:
        residuals_WG = np.full((num_workers, num_groups), np.nan)
    return {
        "step": np.full(num_workers * num_groups, step.step),
        "rank": np.repeat(np.arange(num_workers), num_groups),
        "group": np.tile(np.array(step.groups, object), num_workers),
        "grad_norm": step.group_norms_WG.ravel(),
        "cosine_rest": cosines_WG.ravel(),
        "reduction_residual": residuals_WG.ravel(),
    }


def _digest_rows(report: StepReport) -> Rows:
    step = report.gathered
    width, count = step.num_workers, len(step.differences)
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
    trace, step = report.gathered.trace, report.gathered.step
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


def _trace_block(trace: Trace, step: int) -> Rows:
    """Return the rows of one moment: what the model holds after ``step``.

    Without a norm there is no sketch: a cell is empty then.
    """
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

"""A recorded run as a stream of its live steps."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from rankscope.bus.evidence import DType, Source, Table
from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.bus.step import MISSING_INT, GatheredStep, StepReport
from rankscope.errors import RunError
from rankscope.evidence import columns_of
from rankscope.record.schema import arrow_schema, to_numpy
from rankscope.record.tables import Columns, from_step, parts_in, read_part, read_pieces
from rankscope.stats.arrays import Floats, Ints
from rankscope.stats.direction import from_upper_triangle

_LOCAL = tuple(s.name for s in columns_of(Table.WORKERS, Source.LOCAL))
_DERIVED = tuple(s.name for s in columns_of(Table.WORKERS, Source.DERIVED))
_VALUES = columns_of(Table.STEPS, Source.DERIVED)
_OTHERS = (Table.WORKERS, Table.SAMPLES, Table.MICRO, Table.PAIRS, Table.GROUPS, Table.DIGESTS)

_BLOCK_ROWS = 8192
_MICRO = (("loss", False), ("loss_weight", False), ("grad_norm", True), ("loss_scale", True))
_GROUP_COLUMNS = ("grad_norm", "cosine_rest", "reduction_residual", "accumulator_change")

Rows = Mapping[Table, Columns | None]
"""The rows of one step in every table but ``steps``; None where it has none."""


def read_reports(run: Path, first_step: int) -> Iterator[StepReport]:
    """Yield the recorded steps in order, with all values of their rows.

    They equal, bit for bit, the live results of :func:`rankscope.bus.step.as_recorded`. About one
    file of each table is in memory at a time; steps written meanwhile are left out.

    Raises:
        RunError: A file cannot be read, or a step's rows are damaged.
    """
    last_step = _last_step_of(run)
    if last_step is None:
        return
    cursors = {table: _StepCursor(_blocks_of(run, table, first_step)) for table in _OTHERS}
    for block in _blocks_of(run, Table.STEPS, first_step):
        values = {s.name: _as_floats(block[s.name], s.dtype).tolist() for s in _VALUES}
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
    step: int, time: float, observed: bool, values: Mapping[str, float], rows: Rows
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
    return StepReport(gathered, values, derived, _cosines(rows[Table.PAIRS], width), cosines_WG)


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
    """Return the groups' names ``[G]``, and four columns by worker and group.

    Returns:
        After the names: norms, cosines, residuals and changes of the accumulated gradient.
    """
    if rows is None:
        return (), None, None, None, None
    norms_WG, *others = (rows[name].reshape(width, -1) for name in _GROUP_COLUMNS)
    groups = tuple(rows["group"][: norms_WG.shape[1]].tolist())
    cosines_WG, residuals_WG, changes_WG = map(_unless_unknown, others)
    return groups, norms_WG, cosines_WG, residuals_WG, changes_WG


def _unless_unknown(values: Floats) -> Floats | None:
    return None if np.isnan(values).all() else values


def _cosines(rows: Columns | None, width: int) -> Floats | None:
    return None if rows is None else from_upper_triangle(rows["cosines"][0], width)


def _as_floats(column: Ints | Floats, dtype: DType) -> Floats:
    """Return a column of the steps as floats, with NaN where an integer has no value."""
    if dtype is not DType.INT:
        return column.astype(np.float64)
    return np.where(column == MISSING_INT, np.nan, column.astype(np.float64))


def _blocks_of(run: Path, table: Table, first_step: int) -> Iterator[Columns]:
    """Yield a table as numpy columns, a few thousand rows at a time, in the order of its files.

    Row groups that end before ``first_step`` are left out.

    Raises:
        RunError: A file cannot be read.
    """
    schema = arrow_schema(table)
    for file in parts_in(run / table):
        for rows in read_pieces(file, schema, from_step(first_step)):
            for block in map(pa.table, rows.to_batches(_BLOCK_ROWS)):
                yield {s.name: to_numpy(block[s.name], s.dtype) for s in columns_of(table)}


def _last_step_of(run: Path) -> int | None:
    """Return the last step whose rows are all on disk, None without any.

    Raises:
        RunError: The last file of the steps cannot be read.
    """
    schema = pa.schema([arrow_schema(Table.STEPS).field("step")])
    for file in reversed(parts_in(run / Table.STEPS)):
        steps = read_part(file, schema)["step"]
        if len(steps):
            return int(steps[-1].as_py())
    return None

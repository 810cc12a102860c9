"""Roll-ups of the workers table: few rows for many steps, so that long runs open fast.

``rollups/64`` has a row per worker for every 64 steps, ``rollups/512`` one for every 512: mean and
extremes of each quantity, and the number of steps that have it. Only complete bins are written, in
the flush that completes them; later steps are in the workers table alone. A reader goes from wide
bins to narrow ones to single steps, and reads each step once.

Bins merge exactly: counts and sums add up, the smallest and the largest value stay. A step is a bin
of one. Non-finite values count as missing.

Functions that read raise a RunError where a file cannot be read.

``rollups/samples`` has, every 64 steps, the number of samples so far, and of different ones.

Shapes: T steps, B bins, W workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope.bus.evidence import Column, DType, Source, Table
from rankscope.bus.pace import PACE
from rankscope.bus.step import as_floats
from rankscope.evidence import columns_of
from rankscope.record.rows import Rows
from rankscope.record.schema import Array, schema_of, schema_with, to_numpy
from rankscope.record.tables import num_rows, parts_in, read_rows, read_tail, step_range
from rankscope.stats.arrays import MISSING_INT, Floats, Ints
from rankscope.stats.draws import DistinctSamples

LEVELS = PACE.rolled_up  # steps in a bin of each level, each a multiple of the one before

SAMPLES = "samples"  # the directory of the roll-up of samples

MAX_ROWS = 2**21  # of the workers table that are read; of more, only roll-ups and the end

_ENDS = ("count", "mean", "low", "high")


@cache
def quantities() -> tuple[Column, ...]:
    """Return the columns of the workers table that are rolled up."""
    return tuple(signal for signal in columns_of(Table.WORKERS) if signal.is_quantity)


@cache
def rollup_signals() -> tuple[Column, ...]:
    """Return the columns of a roll-up, from those of the workers table.

    A row is a bin and a worker. For each quantity ``x`` it has ``x_count``, ``x_mean``, ``x_low``
    and ``x_high``.
    """
    keys = (
        ("step", "first step of the bin"),
        ("last_step", "last step of the bin"),
        ("rank", "as in workers"),
    )
    declared = [
        Column(name, Table.WORKERS, DType.INT, "", meaning, Source.KEY) for name, meaning in keys
    ]
    for signal in quantities():
        words = (
            ("count", DType.INT, "steps", "steps of the bin with a finite value of"),
            ("mean", DType.FLOAT, signal.unit, "mean over these steps of"),
            ("low", DType.FLOAT, signal.unit, "smallest in these steps of"),
            ("high", DType.FLOAT, signal.unit, "largest in these steps of"),
        )
        declared += [
            Column(f"{signal.name}_{end}", Table.WORKERS, dtype, unit, f"{text} {signal.name}",
                   Source.DERIVED)
            for end, dtype, unit, text in words
        ]  # fmt: skip
    return tuple(declared)


@cache
def coverage_signals() -> tuple[Column, ...]:
    """Return the columns of the roll-up of samples: a row every ``LEVELS[0]`` steps."""
    rows = (
        ("step", DType.INT, "", Source.KEY, "step up to which is counted"),
        ("drawn", DType.INT, "samples", Source.DERIVED, "samples drawn since the run began"),
        ("distinct", DType.INT, "samples", Source.DERIVED, "different ones among them"),
        ("exact", DType.BOOL, "", Source.DERIVED, "whether that is exact, not an estimate"),
    )
    return tuple(
        Column(name, Table.SAMPLES, dtype, unit, meaning, source)
        for name, dtype, unit, source, meaning in rows
    )


@dataclass(frozen=True, slots=True)
class Bins:
    """One signal in bins of steps, in increasing order; or several, in columns side by side.

    Attributes:
        first_B: First step of each bin that has a row.
        last_B: Last such step.
        count_BW: Number of steps of the bin with a value, by worker.
        sum_BW: Their sum, 0 without any.
        low_BW: The smallest, NaN without any.
        high_BW: The largest, NaN without any.
    """

    first_B: Ints
    last_B: Ints
    count_BW: Ints
    sum_BW: Floats
    low_BW: Floats
    high_BW: Floats

    @property
    def mean_BW(self) -> Floats:  # noqa: N802 - it names its axes
        """The mean of the values, NaN without any."""
        unknown_BW = np.full(self.sum_BW.shape, np.nan)
        means_BW: Floats = np.divide(
            self.sum_BW, self.count_BW, out=unknown_BW, where=self.count_BW > 0
        )
        return means_BW

    def at(self, chosen: slice | Ints) -> "Bins":
        """Return the chosen bins."""
        return Bins(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def merged(self, width: int) -> "Bins":
        """Return bins whose first steps have the same multiple of ``width`` below them."""
        keys_B = self.first_B // width
        starts = np.flatnonzero(np.diff(keys_B, prepend=keys_B[:1] - 1))
        if len(starts) == len(keys_B):
            return self
        sums = np.zeros((len(starts), self.sum_BW.shape[1]))
        with np.errstate(over="ignore"):  # one by one: the same bits however steps are cut
            np.add.at(
                sums, np.repeat(range(len(starts)), np.diff([*starts, len(keys_B)])), self.sum_BW
            )
        return Bins(
            first_B=self.first_B[starts],
            last_B=np.maximum.reduceat(self.last_B, starts),
            count_BW=np.add.reduceat(self.count_BW, starts, axis=0),
            sum_BW=sums,
            low_BW=np.fmin.reduceat(self.low_BW, starts, axis=0),
            high_BW=np.fmax.reduceat(self.high_BW, starts, axis=0),
        )


class Rollups:
    """Collects steps, in increasing order, into bins of all levels."""

    def __init__(self) -> None:
        self._open: dict[int, Bins] = {}

    def add(self, steps: Bins) -> dict[int, Bins]:
        """Add steps, each a bin of its own; return the bins that they complete, by level.

        A bin is complete with its last step, or when the next step belongs to another bin.
        """
        completed = {}
        for level in LEVELS:
            begun = self._open.get(level)
            bins = (steps if begun is None else joined([begun, steps])).merged(level)
            ends = bool(len(bins.last_B)) and (int(bins.last_B[-1]) + 1) % level == 0
            whole = max(0, len(bins.last_B) - (not ends))
            self._open[level] = bins.at(slice(whole, None))
            steps = completed[level] = bins.at(slice(whole))
        return completed


def bins_of_steps(steps_T: Ints, values_TW: Floats) -> Bins:
    """Return each step as a bin of its own."""
    finite_TW = np.isfinite(values_TW)
    known_TW = np.where(finite_TW, values_TW, np.nan)
    sums_TW = np.where(finite_TW, values_TW, 0.0)
    return Bins(steps_T, steps_T, finite_TW.astype(np.int64), sums_TW, known_TW, known_TW)


def joined(parts: Sequence[Bins]) -> Bins:
    """Return the bins of all parts in order; a worker that a part lacks has no value there."""
    width = max(part.count_BW.shape[1] for part in parts)
    return Bins(
        np.concatenate([part.first_B for part in parts]),
        np.concatenate([part.last_B for part in parts]),
        np.concatenate([_widened(part.count_BW, width, 0) for part in parts]),
        np.concatenate([_widened(part.sum_BW, width, 0.0) for part in parts]),
        np.concatenate([_widened(part.low_BW, width, np.nan) for part in parts]),
        np.concatenate([_widened(part.high_BW, width, np.nan) for part in parts]),
    )


def bin_width(first_step: int, last_step: int, max_bins: int) -> int:
    """Return the least power of two that, as a width, gives few enough bins of these steps."""
    width = 1
    while last_step // width - first_step // width + 1 > max(max_bins, 1):
        width *= 2
    return width


def _widened(values_BW: NDArray[Any], width: int, missing: float) -> NDArray[Any]:
    more = width - values_BW.shape[1]
    if not more:
        return values_BW
    padded: NDArray[Any] = np.pad(values_BW, ((0, 0), (0, more)), constant_values=missing)
    return padded


def folder_of(run: Path, kind: int | str) -> Path:
    """Return the directory of the roll-ups of one level, or of samples."""
    return run / "rollups" / str(kind)


def columns_by_folder() -> dict[str, tuple[Column, ...]]:
    """Return the columns of all roll-ups, by name of directory."""
    return {**{str(level): rollup_signals() for level in LEVELS}, SAMPLES: coverage_signals()}


@dataclass(frozen=True, slots=True)
class Coverage:
    """Numbers of samples of a run, and of different ones, at B steps.

    Attributes:
        step_B: The last step that is counted.
        drawn_B: Identified samples since the run began.
        distinct_B: Different ones among them.
        is_exact: Whether that is exact, not an estimate (with a standard error of about 0.5 %).
    """

    step_B: Ints
    drawn_B: Ints
    distinct_B: Ints
    is_exact: bool


Overview = Bins  # one signal of the workers over the whole run, in B bins, of single steps if short


class RollupRows:
    """Makes the rows of roll-ups from those of the tables."""

    def __init__(self) -> None:
        self._rollups = Rollups()
        self._samples = DistinctSamples()

    def add(self, rows: Mapping[Table, Rows]) -> list[tuple[str, Rows]]:
        """Add the rows of consecutive steps; return folder and rows of the completed bins."""
        if Table.WORKERS not in rows:
            return []
        workers = rows[Table.WORKERS]
        values_SN = np.stack([as_floats(np.asarray(workers[s.name])) for s in quantities()])
        steps_T = np.unique(workers["step"])
        values_TSW = values_SN.reshape(len(values_SN), len(steps_T), -1).swapaxes(0, 1)
        bins = bins_of_steps(steps_T, values_TSW.reshape(len(steps_T), -1))
        completed = self._rollups.add(bins)
        found = [
            (str(level), _rows_of(bins)) for level, bins in completed.items() if bins.first_B.size
        ]
        lasts = completed[LEVELS[0]].last_B
        in_time = (lasts + 1) % LEVELS[0] == 0
        later = steps_T[np.minimum(steps_T.searchsorted(lasts, side="right"), len(steps_T) - 1)]
        counted = self._count(rows.get(Table.SAMPLES), np.where(in_time, lasts, later))
        return [*found, *((SAMPLES, row) for row in counted)]

    def _count(self, samples: Rows | None, ends: Ints) -> list[Rows]:
        """Count the samples of some steps; return a row for each of the steps at which bins end."""
        drawn_in = np.asarray([] if samples is None else samples["step"])
        batches = [] if samples is None else samples["samples"]
        found: list[Rows] = []
        begin = 0
        for step in [*np.unique(ends).tolist(), None]:
            end = len(drawn_in) if step is None else int(drawn_in.searchsorted(step, side="right"))
            if end > begin:
                self._samples.add(np.concatenate(batches[begin:end]))
            begin = end
            if step is not None and self._samples.drawn:
                row = (step, self._samples.drawn, self._samples.distinct(), self._samples.is_exact)
                names = (column.name for column in coverage_signals())
                found.append({n: np.array([value]) for n, value in zip(names, row, strict=True)})
        return found


def read_coverage(run: Path) -> Coverage | None:
    """Read the roll-up of samples; None without one."""
    if not parts_in(folder_of(run, SAMPLES)):
        return None
    rows = read_rows(folder_of(run, SAMPLES), schema_of(coverage_signals()))
    step, drawn, distinct, exact = (to_numpy(rows[s.name], s.dtype) for s in coverage_signals())
    return Coverage(step, drawn, distinct, bool(exact.all()))


def _rows_of(bins: Bins) -> Rows:
    """Return a row for each bin and worker."""
    shape = len(bins.first_B), len(quantities()), -1
    parts = [p.reshape(shape) for p in (bins.count_BW, bins.mean_BW, bins.low_BW, bins.high_BW)]
    num_workers = parts[0].shape[-1]
    rows: dict[str, Array] = {
        "step": np.repeat(bins.first_B, num_workers),
        "last_step": np.repeat(bins.last_B, num_workers),
        "rank": np.tile(np.arange(num_workers), len(bins.first_B)),
    }
    for row, signal in enumerate(quantities()):
        ends = zip(_ENDS, parts, strict=True)
        rows |= {f"{signal.name}_{end}": part[:, row].ravel() for end, part in ends}
    return rows


def read_level(
    run: Path, level: int, names: Sequence[str], width: int, first_step: int = 0
) -> dict[str, Bins] | None:
    """Read quantities from the roll-ups of one level.

    None when there are no such roll-ups, or when they lack one of the quantities. Bins that begin
    before ``first_step`` are left out; ``width`` is the least number of workers in the result.
    """
    columns = [f"{name}_{end}" for name in names for end in _ENDS]
    known = [s for s in rollup_signals() if s.name in {"step", "last_step", "rank", *columns}]
    files = parts_in(folder_of(run, level))
    if len(known) < 3 + len(columns) or not files:
        return None
    schema = schema_of(known)
    rows = pa.concat_tables([schema.empty_table(), *read_tail(files, schema, first_step)])
    arrays = {s.name: to_numpy(rows[s.name], s.dtype) for s in known}
    wanted = arrays["step"] >= first_step
    if not wanted.all():
        arrays = {name: array[wanted] for name, array in arrays.items()}
    if any((arrays[f"{name}_count"] == MISSING_INT).any() for name in names):
        return None  # written by a release without this roll-up
    cells = Cells(arrays["step"], arrays["rank"], width)
    last_B = cells.first_of(arrays["last_step"])
    found = {}
    for name in names:
        counts_BW = cells.spread(arrays[f"{name}_count"], np.int64(0))
        means_BW, low_BW, high_BW = (
            cells.spread(arrays[f"{name}_{end}"], np.float64("nan")) for end in _ENDS[1:]
        )
        sums_BW = np.where(counts_BW > 0, means_BW * counts_BW, 0.0)
        found[name] = Bins(cells.steps_B, last_B, counts_BW, sums_BW, low_BW, high_BW)
    return found


def is_sorted(keys: Sequence[Ints]) -> bool:
    """Return whether rows are in order: by the first key, then by the second, and so on."""
    after = np.zeros(max(len(keys[0]) - 1, 0), bool)  # whether a row comes after its predecessor
    for key in keys:
        steps = np.diff(key)
        if ((steps < 0) & ~after).any():
            return False
        after |= steps > 0
    return True


class Cells:
    """Positions of rows, by step and rank, in a matrix of steps and at least ``width`` workers."""

    def __init__(self, steps: Ints, ranks: Ints, width: int) -> None:
        self._width = max(width, int(ranks.max(initial=-1)) + 1)
        even = self._width > 0 and len(steps) % self._width == 0
        block = steps.reshape(-1, self._width) if even else steps[:, None]
        self._is_whole = (
            even
            and bool((np.diff(block[:, 0]) > 0).all() and (block == block[:, :1]).all())
            and bool((ranks.reshape(block.shape) == np.arange(self._width)).all())
        )
        if self._is_whole:
            self.steps_B = block[:, 0].copy()  # the steps that have rows, in increasing order
            return
        self._ranks = ranks
        self.steps_B, self._at = np.unique(steps, return_inverse=True)

    def spread(self, values: Array, missing: np.generic) -> Array:
        """Return a column as a matrix ``[B, W]``, with ``missing`` where there is no row."""
        shape = len(self.steps_B), self._width
        if self._is_whole:
            return values.reshape(shape)
        matrix = np.full(shape, missing)
        matrix[self._at, self._ranks] = values
        return matrix

    def first_of(self, values: Array) -> Array:
        """Return a column ``[B]`` that all rows of a step have in common."""
        if self._is_whole:
            return values[:: self._width].copy()
        column = np.empty(len(self.steps_B), values.dtype)
        column[self._at] = values
        return column


def read_overviews(
    run: Path, names: Sequence[str], num_workers: int, max_bins: int
) -> dict[str, Overview]:
    """Read quantities over a whole run, each file once.

    From the workers table where there are no roll-ups, and where bins are narrower than those of
    the roll-ups, with up to ``MAX_ROWS`` rows. Else from the widest roll-ups that are narrow
    enough, then from narrower ones, and from single steps at the end.

    A run of up to ``max_bins`` steps has a bin for each.
    """
    found = step_range(run, Table.WORKERS)
    if found is None:
        nothing = bins_of_steps(np.empty(0, np.int64), np.empty((0, num_workers)))
        return dict.fromkeys(names, nothing)
    first, last = found
    num_steps = last - first + 1
    schema = schema_with(Table.WORKERS, ("step", "rank", *names))
    width = bin_width(first, last, max_bins)
    files = parts_in(run / Table.WORKERS)
    few = num_steps * num_workers <= MAX_ROWS or num_steps <= max_bins
    parts: list[dict[str, Bins]] = []
    if few and width < LEVELS[0]:
        if num_rows(files) <= MAX_ROWS:
            bins = bins_of(read_rows(run / Table.WORKERS, schema), names, num_workers)
            return {name: thinned(bins[name], max_bins) for name in names}
    else:
        width = max(width, LEVELS[0])
        parts = _rolled(run, names, num_workers, width)
    after = max((int(part[names[0]].last_B.max()) for part in parts), default=first - 1)
    for rows in read_tail(files, schema, after + 1):
        tail = bins_of(rows.filter(pc.field("step") > after), names, num_workers)
        parts.append({name: bins.merged(width) for name, bins in tail.items()})
    whole = {name: joined([part[name] for part in parts]).merged(width) for name in names}
    return {name: thinned(whole[name], max_bins) for name in names}


def bins_of(rows: pa.Table, names: Sequence[str], num_workers: int) -> dict[str, Bins]:
    """Return rows of the workers table as bins of one step, by quantity."""
    steps = to_numpy(rows["step"], DType.INT)
    cells = Cells(steps, to_numpy(rows["rank"], DType.INT), num_workers)
    missing = np.float64("nan")
    return {
        name: bins_of_steps(
            cells.steps_B,
            cells.spread(to_numpy(rows[name].cast(pa.float64(), safe=False), DType.FLOAT), missing),
        )
        for name in names
    }


def _rolled(run: Path, names: Sequence[str], num_workers: int, width: int) -> list[dict[str, Bins]]:
    """Return the bins of the roll-ups, those of the widest level first."""
    parts: list[dict[str, Bins]] = []
    next_step = 0
    for level in sorted(LEVELS, reverse=True):
        part = read_level(run, level, names, num_workers, next_step) if level <= width else None
        if part is not None and len(part[names[0]].last_B):
            parts.append({name: bins.merged(width) for name, bins in part.items()})
            next_step = int(part[names[0]].last_B.max()) + 1
    return parts


def thinned(bins: Bins, max_bins: int) -> Bins:
    """Return bins with neighbours merged, so that at most ``max_bins`` are left."""
    if len(bins.first_B) <= max_bins:
        return bins
    return bins.merged(bin_width(int(bins.first_B[0]), int(bins.first_B[-1]), max_bins))

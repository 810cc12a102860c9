"""From a run's arrays to the few rows that figures draw: curves, bands, lines, maps of all workers.

Long runs are thinned in bins of steps, and each bin keeps its lowest and its highest value: a
spike of a single step stays visible at any length. An overview holds a run of any length in a few
hundred bins, with the mean, the lowest and the highest value of each worker in every bin. Groups of
parameters are shown as means over the last observed steps. Rows are lists of plain dictionaries; an
undefined value becomes None, which figures leave blank.

Shapes: T steps, B bins, W workers, R rows of a map, G groups.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.evidence import Table
from rankscope.record import Columns, Overview, Run
from rankscope.record.rollups import thinned
from rankscope.stats.arrays import Bools, Floats, Ints

Row = dict[str, Any]

MAX_BINS = 220  # bins of one curve: about one per two pixels of the widest figure
MAX_LINES = 48  # workers that a figure draws as lines of their own
MAX_POINTS = 9_000  # points of all workers' lines in one figure
MAX_CELLS = 160_000  # cells of all frames of one heatmap
_EXACT_POWERS = 22  # powers of ten up to this one are exact as floating-point numbers
MAX_SAMPLES = 30_000_000  # sample identities that are counted for the coverage figure (240 MB)


def extremes(values_T: Floats, num_bins: int = MAX_BINS) -> Ints:
    """Return the indices that keep the shape of a curve: lowest and highest of every bin.

    With bins of equal width, at most twice as many increasing indices come back, plus two: the
    first and last included, all of them if there are at most ``2 * num_bins``.
    """
    length = len(values_T)
    if length <= 2 * num_bins:
        return np.arange(length)
    edges = np.linspace(0, length, num_bins + 1).astype(np.int64)
    keep = {0, length - 1}
    for start, stop in itertools.pairwise(edges):
        part = values_T[start:stop]
        known = np.flatnonzero(np.isfinite(part))
        if known.size:
            keep.add(int(start + known[part[known].argmin()]))
            keep.add(int(start + known[part[known].argmax()]))
    return np.array(sorted(keep), dtype=np.int64)


def curve(steps_T: Ints, values_T: Floats) -> list[Row]:
    """Return rows ``{step, value}`` of one curve, thinned with its extremes kept."""
    kept = extremes(values_T)
    return _rows(step=steps_T[kept], value=values_T[kept])


def chosen_workers(values_TW: Floats, named: Iterable[int] = ()) -> list[int]:
    """Return the ranks to draw: all, or those that matter most and an even sample of the rest.

    With more than ``MAX_LINES`` workers these are the workers that a finding names, those with
    the largest mean distance from the median worker, and evenly spaced others.
    """
    num_workers = values_TW.shape[1]
    if num_workers <= MAX_LINES:
        return list(range(num_workers))
    known = np.isfinite(values_TW)
    parts = [row[finite] for row, finite in zip(values_TW, known, strict=True)]
    centre_T1 = np.array([[np.median(part) if part.size else 0.0] for part in parts])
    distance_TW = np.where(known, np.abs(np.where(known, values_TW, 0.0) - centre_T1), 0.0)
    distance_W = distance_TW.sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    chosen = dict.fromkeys([rank for rank in named if 0 <= rank < num_workers][: MAX_LINES // 2])
    chosen |= dict.fromkeys(np.argsort(-distance_W, kind="stable")[: MAX_LINES // 4].tolist())
    others = [rank for rank in range(num_workers) if rank not in chosen]
    even = np.linspace(0, len(others) - 1, MAX_LINES - len(chosen)).astype(int)
    return sorted([*chosen, *(others[index] for index in even)])


def deviations(values_TW: Floats) -> list[Row]:
    """Return rows ``{rank, value, low, high}``: how far each worker lies from the step's mean.

    ``value`` is the mean over steps, ``low`` and ``high`` are one standard error below and above
    it. Workers without a value have no row; with a single step the error is unknown and None.
    """
    known_TW = np.isfinite(values_TW)
    counts_T = known_TW.sum(axis=1)
    sums_T = np.where(known_TW, values_TW, 0.0).sum(axis=1)
    means_T = np.divide(sums_T, counts_T, out=np.zeros(len(sums_T)), where=counts_T > 0)
    ranks = np.flatnonzero(known_TW.any(axis=0))
    known_WT = np.ascontiguousarray(known_TW.T[ranks])
    apart_WT = np.where(known_WT, values_TW.T[ranks], means_T) - means_T
    apart_WT[np.abs(apart_WT) <= _ROUNDING * np.abs(means_T)] = 0.0  # of copies
    counts_W = known_WT.sum(axis=1)
    middle_W = apart_WT.sum(axis=1) / counts_W
    squares_W = np.square(np.where(known_WT, apart_WT - middle_W[:, None], 0.0)).sum(axis=1)
    unknown_W = np.full(len(ranks), np.nan)
    variance_W = np.divide(squares_W, counts_W - 1, out=unknown_W, where=counts_W > 1)
    error_W = np.sqrt(variance_W) / np.sqrt(counts_W)
    return _rows(rank=ranks, value=middle_W, low=middle_W - error_W, high=middle_W + error_W)


def frames(steps_T: Ints, cosines_TWW: Floats) -> tuple[list[str], list[Row]]:
    """Return a heatmap's frames: the mean over the run first, then single steps.

    Returns a label per frame, and rows ``{frame, cosines}`` whose flat list has W² values row by
    row, None where undefined. Steps are thinned to ``MAX_CELLS`` cells in all.
    """
    length, num_workers = cosines_TWW.shape[:2]
    most = int(np.clip(MAX_CELLS // max(num_workers**2, 1), 8, 400))
    kept = np.unique(np.linspace(0, max(length - 1, 0), min(length, most)).astype(np.int64))
    known = np.isfinite(cosines_TWW)
    counts = known.sum(axis=0)
    sums = np.where(known, cosines_TWW, 0.0).sum(axis=0)
    mean = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    labels = [f"mean of {length:,} steps", *(f"step {step:,}" for step in steps_T[kept])]
    stack = [mean, *cosines_TWW[kept]]
    return labels, [
        {"frame": index, "cosines": plains(frame.ravel(), 3)} for index, frame in enumerate(stack)
    ]


def coverage(steps_R: Ints, samples_R: Sequence[Ints]) -> list[Row]:
    """Return rows ``{step, drawn, distinct}``: samples so far, and different ones among them."""
    sizes_R = np.array([len(samples) for samples in samples_R], dtype=np.int64)
    if not sizes_R.sum() or sizes_R.sum() > MAX_SAMPLES:
        return []
    steps_N = np.repeat(steps_R, sizes_R)
    _, first = np.unique(np.concatenate(list(samples_R)), return_index=True)
    is_new_N = np.zeros(len(steps_N), dtype=np.int64)
    is_new_N[first] = 1
    steps_T, last = np.unique(steps_N[::-1], return_index=True)
    ends = len(steps_N) - 1 - last
    distinct_T = np.cumsum(is_new_N)[ends]
    kept = np.unique(np.linspace(0, len(steps_T) - 1, 2 * MAX_BINS).astype(np.int64))
    return _rows(step=steps_T[kept], drawn=(ends + 1)[kept], distinct=distinct_T[kept])


def _rows(**columns: NDArray[Any]) -> list[Row]:
    names = list(columns)
    lists = [plains(column) for column in columns.values()]
    return [dict(zip(names, values, strict=True)) for values in zip(*lists, strict=True)]


def plain(value: Any, digits: int = 6) -> float | int | None:
    """Return a JSON number of few digits, or None for NaN and infinities."""
    if isinstance(value, np.integer | int):
        return int(value)
    if not np.isfinite(value):
        return None
    short = float(f"{float(value):.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short


def plains(values_N: NDArray[Any], digits: int = 6) -> list[float | int | None]:
    """Return :func:`plain` of every value of an array, which is much faster than one by one."""
    if values_N.dtype.kind in "iu":
        return [int(value) for value in values_N.tolist()]
    known_N = np.isfinite(values_N)
    sizes_N = np.abs(np.where(known_N & (values_N != 0), values_N, 1.0).astype(np.float64))
    places_N = digits - 1 - np.floor(np.log10(sizes_N))
    unusual_N = known_N & (np.abs(places_N) > _EXACT_POWERS)  # powers of ten that are not exact
    up_N = 10.0 ** np.clip(places_N, 0, _EXACT_POWERS)
    down_N = 10.0 ** np.clip(-places_N, 0, _EXACT_POWERS)
    rounded_N = np.rint(np.where(known_N, values_N, 0.0) / down_N * up_N) / up_N * down_N
    whole_N = rounded_N == np.rint(rounded_N)
    short: list[float | int | None] = rounded_N.tolist()
    for index in np.flatnonzero(whole_N & (np.abs(rounded_N) < 2**53)).tolist():
        short[index] = int(rounded_N[index])
    for index in np.flatnonzero(~known_N | unusual_N).tolist():
        short[index] = plain(values_N[index], digits)
    return short


MAX_ROWS = 64  # of a map: with more workers, a row holds several and shows the farthest of them
MIN_LINE_BINS = 20
NEARBY = 9  # bins over which the workers' usual distance from their median is taken
MAX_GROUP_STEPS = 32  # steps that are averaged
MAX_TABLE_ROWS = 400_000  # rows of the table that are read for it, though always the last flush
MAX_GROUPS = 96  # that are shown: of more, those in which a worker is farthest from the others

_MAD_TO_STD = 1.4826
_MEAN_DEVIATION_TO_STD = 1.2533
_ROUNDING = 1e-6  # distances below this share of the median come from rounding


def known_bins(view: Overview) -> Overview:
    """Return an overview without the bins in which no worker has a finite value."""
    return view.at(np.flatnonzero(np.isfinite(view.mean_BW).any(axis=1)))


def band(view: Overview) -> list[Row]:
    """Return rows ``{step, low, high}``: the workers' range in each bin, None where undefined."""
    low_B, high_B = _range(view)
    rows = [
        {"step": int(step), "low": plain(low), "high": plain(high)}
        for step, low, high in zip(view.first_B, low_B, high_B, strict=True)
    ]
    if rows and view.last_B[-1] > view.first_B[-1]:
        rows.append({**rows[-1], "step": int(view.last_B[-1])})
    return rows


def range_at(view: Overview, steps: Sequence[int]) -> list[tuple[float | None, float | None]]:
    """Return the workers' lowest and highest value in the bins that hold the given steps."""
    if not len(view.first_B):
        return [(None, None)] * len(steps)
    low_B, high_B = _range(view)
    at = np.searchsorted(view.first_B, steps, side="right") - 1
    inside = (at >= 0) & (np.asarray(steps) <= view.last_B[at])
    return [
        (plain(low_B[b]), plain(high_B[b])) if ok else (None, None)
        for b, ok in zip(at, inside, strict=True)
    ]


def _range(view: Overview) -> tuple[Floats, Floats]:
    low_BW = np.where(np.isfinite(view.low_BW), view.low_BW, np.nan)
    high_BW = np.where(np.isfinite(view.high_BW), view.high_BW, np.nan)
    low_B: Floats = np.fmin.reduce(low_BW, axis=1, initial=np.nan)
    high_B: Floats = np.fmax.reduce(high_BW, axis=1, initial=np.nan)
    return low_B, high_B


def chosen(view: Overview, named: Iterable[int] = ()) -> list[int]:
    """Return the ranks to draw as lines, see :func:`chosen_workers`."""
    return chosen_workers(np.vstack([view.mean_BW, view.low_BW, view.high_BW]), named)


def lines(view: Overview, ranks: Sequence[int]) -> list[Row]:
    """Return rows ``{step, rank, value}`` of the given workers: lowest and highest of each bin."""
    most = max(MIN_LINE_BINS, MAX_POINTS // (2 * max(len(ranks), 1)))
    view = thinned(view, most)
    steps = list(zip(view.first_B.tolist(), view.last_B.tolist(), strict=True))
    points: list[tuple[int, int, float]] = []
    for rank in ranks:
        before = -np.inf
        columns = (steps, view.low_BW[:, rank].tolist(), view.high_BW[:, rank].tolist())
        for (first, last), low, high in zip(*columns, strict=True):
            one, other = (low, high) if low >= before else (high, low)
            if low == high or first == last:
                points.append((first, rank, low))
            else:
                points += [(first, rank, one), (last, rank, other)]
            before = other
    values = plains(np.array([value for _, _, value in points]))
    return [
        {"step": step, "rank": int(rank), "value": value}
        for (step, rank, _), value in zip(points, values, strict=True)
    ]


def robust_units(values_BW: Floats, *, nearby: int = NEARBY) -> Floats:
    """Return each value's distance from the workers' median, in robust standard deviations.

    The unit of a bin is 1.4826 times the median absolute deviation over workers (1.2533 times the
    mean one where more than half of the workers are equal), as the median over the bins nearby: of
    few workers, one bin alone would give a poor unit.

    ``values_BW`` has at least one finite value in every bin. A unit is 0 where the workers do not
    differ by more than rounding, NaN where undefined.
    """
    values_BW = np.where(np.isfinite(values_BW), values_BW, np.nan)
    median_B1 = _median_of_workers(values_BW)[:, None]
    apart_BW = values_BW - median_B1
    unit_B = _MAD_TO_STD * _median_of_workers(np.abs(apart_BW))
    mean_B = _MEAN_DEVIATION_TO_STD * np.nanmean(np.abs(apart_BW), axis=1)
    unit_B = np.where(unit_B > _ROUNDING * np.abs(median_B1[:, 0]), unit_B, mean_B)
    unit_B = _nearby(unit_B, min(nearby, len(unit_B) - (len(unit_B) + 1) % 2))
    real_B = unit_B > _ROUNDING * np.abs(median_B1[:, 0])
    unit_B1 = np.where(real_B, unit_B, 1.0)[:, None]
    units_BW: Floats = np.where(np.isnan(apart_BW), np.nan, real_B[:, None] * apart_BW / unit_B1)
    return units_BW


def _median_of_workers(values_BW: Floats) -> Floats:
    """Return the median of the known values in each bin; numpy's nanmedian goes row by row."""
    if np.isfinite(values_BW).all():
        known_B: Floats = np.median(values_BW, axis=1)
        return known_B
    sorted_BW = np.sort(values_BW, axis=1)  # NaN last
    counts_B = np.isfinite(values_BW).sum(axis=1)
    middle_B2 = np.stack([(counts_B - 1) // 2, counts_B // 2], axis=1)
    medians_B: Floats = np.take_along_axis(sorted_BW, middle_B2, axis=1).mean(axis=1)
    return medians_B


def _nearby(values_B: Floats, width: int) -> Floats:
    """Return the median over so many bins around each."""
    if width <= 1:
        return values_B
    padded = np.pad(values_B, width // 2, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)
    medians: Floats = np.median(windows, axis=1)
    return medians


def farthest(view: Overview) -> tuple[Floats, Floats]:
    """Return each bin's and worker's distance from the others, and its value, ``[B, W]`` each.

    A bin of several steps is compared three times, by the workers' means, lowest and highest
    values in it; the comparison that sets the worker farthest apart counts. Distances are in robust
    units; the overview has known bins only.
    """
    units_3BW = np.stack([robust_units(v) for v in (view.mean_BW, view.low_BW, view.high_BW)])
    sizes_3BW = np.where(np.isnan(units_3BW), -1.0, np.abs(units_3BW))
    pick_1BW = sizes_3BW.argmax(axis=0)[None]
    values_3BW = np.stack([view.mean_BW, view.low_BW, view.high_BW])
    units_BW = np.take_along_axis(units_3BW, pick_1BW, axis=0)[0]
    return units_BW, np.take_along_axis(values_3BW, pick_1BW, axis=0)[0]


def row_edges(num_workers: int, max_rows: int = MAX_ROWS) -> Ints:
    """Return the first rank of each row of a map, and W at the end."""
    num_rows = min(num_workers, max_rows)
    return (np.arange(num_rows + 1) * num_workers) // max(num_rows, 1)


def map_rows(view: Overview, widest: int = 1) -> list[Row]:
    """Return a worker × time map: rows ``{first, last, until, deviation, value, rank}``.

    One row per bin of steps that has values. ``until`` is where its cells end, to the right of the
    last step: cells of a measured step reach to the next one over ``widest`` steps at most. Lists
    hold R cells each, from rank 0 on: the distance from the median in robust units, the value, and
    the rank that both belong to. None where undefined.
    """
    view = known_bins(view)
    if not len(view.first_B):
        return []
    cells = cells_of(*farthest(view))
    times = zip(view.first_B, view.last_B, _ends(view, widest), strict=True)
    return [
        {"first": int(first), "last": int(last), "until": int(until), **row}
        for (first, last, until), row in zip(times, cells, strict=True)
    ]


def cells_of(units_BW: Floats, values_BW: Floats, max_rows: int = MAX_ROWS) -> list[Row]:
    """Return rows ``{deviation, value, rank}`` of lists: the farthest worker of each cell."""
    sizes_BW = np.where(np.isnan(units_BW), -1.0, np.abs(units_BW))
    spans = itertools.pairwise(row_edges(units_BW.shape[1], max_rows))
    ranks_BR = np.stack([a + sizes_BW[:, a:b].argmax(axis=1) for a, b in spans], axis=1)
    units = plains(np.round(np.take_along_axis(units_BW, ranks_BR, axis=1), 2).ravel())
    values = plains(np.take_along_axis(values_BW, ranks_BR, axis=1).ravel(), 4)
    size = ranks_BR.shape[1]
    return [
        {"deviation": units[at : at + size], "value": values[at : at + size], "rank": ranks}
        for at, ranks in zip(itertools.count(0, size), ranks_BR.tolist(), strict=False)
    ]


def _ends(view: Overview, widest: int) -> Ints:
    """Return where each bin's cells end: at the next bin, unless more steps are missing."""
    after_B = view.last_B + 1
    next_B = np.append(view.first_B[1:], after_B[-1:] + widest - 1)
    ends_B: Ints = np.where(next_B - after_B < widest, next_B, after_B)
    return ends_B


@dataclass(frozen=True, slots=True)
class BinnedGroups:
    """Means over the last observed steps, NaN where unknown.

    Groups are in the model's order; ``cosine_GW`` is the cosine with the sum of all others.
    ``absent_GW``: whether a worker had no gradient in most of the steps in which it was measured.
    """

    names: list[str]
    norm_GW: Floats
    cosine_GW: Floats
    absent_GW: Bools
    num_steps: int
    last_step: int


def last_groups(run: Run) -> BinnedGroups | None:
    """Return the groups' means over the last observed steps, None if there are no groups."""
    columns = _last_rows(run)
    if columns is None:
        return None
    places: dict[str, int] = {}
    at = [places.setdefault(name, len(places)) for name in columns["group"].tolist()]
    steps = np.unique(columns["step"])
    shape = (len(places), max(run.num_workers, int(columns["rank"].max()) + 1))
    cells = np.array(at) * shape[1] + columns["rank"]
    return BinnedGroups(
        names=[str(name) for name in places],
        norm_GW=_means_of(cells, columns["grad_norm"], shape),
        cosine_GW=_means_of(cells, columns["cosine_rest"], shape),
        absent_GW=absent(
            np.searchsorted(steps, columns["step"]), cells, columns["grad_norm"], shape
        ),
        num_steps=len(steps),
        last_step=int(steps[-1]),
    )


def absent(at_R: Ints, cells_R: Ints, norms_R: Floats, shape: tuple[int, int]) -> Bools:
    """Return where the norm is 0, or missing beside those of others, in most steps, from R rows."""
    norms_SGW = np.full((int(at_R.max()) + 1, *shape), np.nan)
    norms_SGW.reshape(len(norms_SGW), -1)[at_R, cells_R] = norms_R
    known_SGW = ~np.isnan(norms_SGW)
    measured_SW = known_SGW.any(axis=1)
    expected_SGW = measured_SW[:, None, :] & known_SGW.any(axis=2)[:, :, None]
    absent_SGW = expected_SGW & ~(np.abs(norms_SGW) > 0)
    absent_GW: Bools = 2 * absent_SGW.sum(axis=0) > measured_SW.sum(axis=0)
    return absent_GW


ABSENT = "0"  # mark of a cell whose worker has no gradient of the group
UNKNOWN = "–"  # mark of a cell that was not observed


def norm_rows(groups: BinnedGroups) -> list[Row]:
    """Return rows ``{group, deviation, value, rank, mark}``: powers of 2 over the median norm."""
    norm_GW = np.where((groups.norm_GW > 0) & ~groups.absent_GW, groups.norm_GW, np.nan)
    known_G = np.flatnonzero(np.isfinite(norm_GW).any(axis=1))
    norm_GW = norm_GW[known_G]
    powers_GW = np.log2(norm_GW)
    if len(norm_GW):
        powers_GW -= np.log2(np.nanmedian(norm_GW, axis=1, keepdims=True))
    return _group_rows(groups, known_G, powers_GW, groups.norm_GW[known_G])


def direction_rows(groups: BinnedGroups) -> list[Row]:
    """Return rows of the cosines with the sum of all others, in robust units."""
    known_G = np.flatnonzero(np.isfinite(groups.cosine_GW).any(axis=1))
    values_GW = groups.cosine_GW[known_G]
    units_GW = robust_units(values_GW, nearby=1) if len(values_GW) else values_GW
    return _group_rows(groups, known_G, units_GW, values_GW)


def _group_rows(
    groups: BinnedGroups, known_G: Ints, units_GW: Floats, values_GW: Floats
) -> list[Row]:
    """Return the rows of the known groups, up to a number of them, in the model's order."""
    absent_GW = groups.absent_GW[known_G]
    names = np.array(groups.names, dtype=object)[known_G]
    units_GW = np.where(absent_GW, np.inf, units_GW)  # farther than any
    rows = []
    for name, absent_W, row in zip(names, absent_GW, cells_of(units_GW, values_GW), strict=True):
        marks = [
            ABSENT if absent_W[rank] else UNKNOWN if deviation is None else ""
            for rank, deviation in zip(row["rank"], row["deviation"], strict=True)
        ]
        rows.append({"group": name, **row, "mark": marks})
    if len(rows) <= MAX_GROUPS:
        return rows
    size_G = np.where(np.isnan(units_GW), 0.0, np.abs(units_GW)).max(axis=1)
    return [rows[index] for index in sorted(np.argsort(-size_G, kind="stable")[:MAX_GROUPS])]


def _last_rows(run: Run) -> Columns | None:
    """Return the rows of the last observed steps, None without any."""
    names = ("step", "rank", "group", "grad_norm", "cosine_rest")
    columns = run.latest(Table.GROUPS, *names, max_rows=MAX_TABLE_ROWS)
    steps = np.unique(columns["step"])
    if not len(steps):
        return None
    kept = columns["step"] >= steps[-MAX_GROUP_STEPS:][0]
    return {name: values[kept] for name, values in columns.items()}


def _means_of(cells: np.ndarray, values: Floats, shape: tuple[int, int]) -> Floats:
    known = np.isfinite(values)
    size = shape[0] * shape[1]
    sums = np.bincount(cells[known], values[known], size)
    counts = np.bincount(cells[known], minlength=size)
    means = np.divide(sums, counts, out=np.full(size, np.nan), where=counts > 0)
    result: Floats = means.reshape(shape)
    return result

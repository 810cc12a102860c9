"""From a run's arrays to the few rows that a figure draws.

Long runs are thinned in bins of steps, and each bin keeps its lowest and its highest value: a
spike of a single step stays visible at any length. Rows are lists of plain dictionaries; an
undefined value becomes None, which figures leave blank.

Shapes: T steps, W workers.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.arrays import Floats, Ints

Row = dict[str, Any]

MAX_BINS = 220
"""Bins of one curve: about one per two pixels of the widest figure."""
MAX_LINES = 48
"""Workers that a figure draws as lines of their own."""
MAX_POINTS = 9_000
"""Points of all workers' lines in one figure."""
MAX_CELLS = 160_000
"""Cells of all frames of one heatmap."""
_EXACT_POWERS = 22
"""Powers of ten up to this one are exact as floating-point numbers."""
MAX_SAMPLES = 30_000_000
"""Sample identities that are counted for the coverage figure (240 MB)."""


def extremes(values_T: Floats, num_bins: int = MAX_BINS) -> Ints:
    """Return the indices that keep the shape of a curve: lowest and highest of every bin.

    Args:
        values_T: The curve, NaN where undefined.
        num_bins: Bins of equal width; at most twice as many indices come back, plus two.

    Returns:
        Increasing indices into ``values_T``, the first and last included; all of them if there
        are at most ``2 * num_bins``.
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


def curve(steps_T: Ints, values_T: Floats, num_bins: int = MAX_BINS) -> list[Row]:
    """Return rows ``{step, value}`` of one curve, thinned with its extremes kept."""
    kept = extremes(values_T, num_bins)
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
    counts_W = known_WT.sum(axis=1)
    middle_W = apart_WT.sum(axis=1) / counts_W
    squares_W = np.square(np.where(known_WT, apart_WT - middle_W[:, None], 0.0)).sum(axis=1)
    unknown_W = np.full(len(ranks), np.nan)
    variance_W = np.divide(squares_W, counts_W - 1, out=unknown_W, where=counts_W > 1)
    error_W = np.sqrt(variance_W) / np.sqrt(counts_W)
    return _rows(rank=ranks, value=middle_W, low=middle_W - error_W, high=middle_W + error_W)


def frames(steps_T: Ints, cosines_TWW: Floats) -> tuple[list[str], list[Row]]:
    """Return a heatmap's frames: the mean over the run first, then single steps.

    Args:
        steps_T: Steps in which gradients were observed.
        cosines_TWW: Pairwise cosines of these steps, NaN where undefined.

    Returns:
        A label per frame, and rows ``{frame, cosines}`` whose flat list has W² values row by row,
        None where undefined. Steps are thinned to ``MAX_CELLS`` cells in all.
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


def coverage(steps_R: Ints, samples_R: Sequence[Ints], num_bins: int = MAX_BINS) -> list[Row]:
    """Return rows ``{step, drawn, distinct}``: samples so far, and different ones among them.

    R rows of the samples table in increasing order of steps; about ``num_bins`` rows come back.
    """
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
    kept = np.unique(np.linspace(0, len(steps_T) - 1, 2 * num_bins).astype(np.int64))
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

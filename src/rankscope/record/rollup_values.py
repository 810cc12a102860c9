"""Bins of steps with the mean and the extremes of each worker.

A step is a bin of one. Bins merge exactly: counts and sums add up, the smallest and the largest
value stay. Non-finite values count as missing.

Shapes: T steps, B bins, W workers, S signals.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.evidence import Column, DType, Source, Table
from rankscope.bus.pace import PACE
from rankscope.evidence import columns_of
from rankscope.stats.arrays import Floats, Ints

LEVELS = PACE.rolled_up  # steps in a bin of each level, each a multiple of the one before


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
    """One signal in bins of steps, in increasing order.

    Attributes:
        first_B: First step of each bin that has a row.
        last_B: Last such step.
        count_BW: Number of steps of the bin with a value, by worker.
        mean_BW: Their mean, NaN without any.
        low_BW: The smallest, NaN without any.
        high_BW: The largest, NaN without any.
    """

    first_B: Ints
    last_B: Ints
    count_BW: Ints
    mean_BW: Floats
    low_BW: Floats
    high_BW: Floats

    def merged(self, width: int) -> "Bins":
        """Return bins whose first steps have the same multiple of ``width`` below them."""
        keys_B = self.first_B // width
        starts = np.flatnonzero(np.diff(keys_B, prepend=keys_B[:1] - 1))
        if len(starts) == len(keys_B):
            return self
        counts = np.add.reduceat(self.count_BW, starts, axis=0)
        known_BW = np.where(self.count_BW > 0, self.mean_BW * self.count_BW, 0.0)
        sums = np.add.reduceat(known_BW, starts, axis=0)
        return Bins(
            first_B=self.first_B[starts],
            last_B=np.maximum.reduceat(self.last_B, starts),
            count_BW=counts,
            mean_BW=_mean(sums, counts),
            low_BW=np.fmin.reduceat(self.low_BW, starts, axis=0),
            high_BW=np.fmax.reduceat(self.high_BW, starts, axis=0),
        )


@dataclass(frozen=True, slots=True)
class WholeBin:
    """A complete bin of one level, of all quantities."""

    level: int  # steps in a bin of its level; the run's first bin may have fewer
    first: int  # first step of the bin that was added
    last: int  # last such step
    count_SW: Ints  # finite values, by quantity and worker
    sum_SW: Floats  # their sum; the terms ``[T, S, W]`` while the T steps of a part join a bin
    low_SW: Floats  # the smallest, NaN without any
    high_SW: Floats  # the largest, NaN without any

    def mean(self) -> Floats:
        """Return the mean of the finite values ``[S, W]``, NaN without any."""
        return _mean(self.sum_SW, self.count_SW)


class Rollups:
    """Collects steps, in increasing order, into bins of all levels."""

    def __init__(self) -> None:
        self._open: dict[int, WholeBin] = {}

    def add(self, steps_T: Ints, values_TSW: Floats) -> list[WholeBin]:
        """Add steps of one bin of the narrowest level, and return the bins that they complete.

        A bin is complete with its last step, or when the next step belongs to another bin.
        ``values_TSW`` has all quantities in the order of :func:`quantities`.
        """
        finite_TSW = np.isfinite(values_TSW)
        known_TSW = np.where(finite_TSW, values_TSW, np.nan)
        sum_TSW = np.where(finite_TSW, values_TSW, 0.0)
        arrived = [
            WholeBin(
                1,
                int(steps_T[0]),
                int(steps_T[-1]),
                np.count_nonzero(finite_TSW, axis=0),
                sum_TSW,
                np.fmin.reduce(known_TSW, axis=0),
                np.fmax.reduce(known_TSW, axis=0),
            )
        ]
        completed: list[WholeBin] = []
        for level in LEVELS:
            arrived = [whole for part in arrived for whole in self._join(level, part)]
            completed += arrived
        return completed

    def _join(self, level: int, part: WholeBin) -> list[WholeBin]:
        completed = []
        before = self._open.pop(level, None)
        if before is not None and before.first // level != part.first // level:
            completed.append(before)
            before = None
        grown = _begun(level, part) if before is None else _grown(before, part)
        if (grown.last + 1) % level == 0:
            completed.append(grown)
        else:
            self._open[level] = grown
        return completed


def _begun(level: int, part: WholeBin) -> WholeBin:
    """Return a new bin of one part, with arrays of its own."""
    return WholeBin(
        level,
        part.first,
        part.last,
        part.count_SW.copy(),
        _total(part.sum_SW),
        part.low_SW.copy(),
        part.high_SW.copy(),
    )


def _grown(before: WholeBin, part: WholeBin) -> WholeBin:
    """Return a bin with one more part; its arrays are changed in place."""
    np.add(before.count_SW, part.count_SW, out=before.count_SW)
    before.sum_SW[...] = _total(part.sum_SW, before.sum_SW)
    np.fmin(before.low_SW, part.low_SW, out=before.low_SW)
    np.fmax(before.high_SW, part.high_SW, out=before.high_SW)
    return replace(before, last=part.last)


def _total(sums: Floats, before: Floats | None = None) -> Floats:
    """Return a part's sum ``[S, W]``, added to ``before``; several steps are ``[T, S, W]``."""
    parts = [*sums] if sums.ndim == 3 else [sums]
    total = parts.pop(0).copy() if before is None else before
    with np.errstate(over="ignore"):
        for part in parts:
            total = total + part
    return total


def bins_of_steps(steps_T: Ints, values_TW: Floats) -> Bins:
    """Return each step as a bin of its own."""
    finite_TW = np.isfinite(values_TW)
    known_TW = np.where(finite_TW, values_TW, np.nan)
    return Bins(steps_T, steps_T, finite_TW.astype(np.int64), known_TW, known_TW, known_TW)


def joined(parts: Sequence[Bins]) -> Bins:
    """Return the bins of all parts in order; a worker that a part lacks has no value there."""
    width = max(part.count_BW.shape[1] for part in parts)
    return Bins(
        np.concatenate([part.first_B for part in parts]),
        np.concatenate([part.last_B for part in parts]),
        np.concatenate([_widened(part.count_BW, width, 0) for part in parts]),
        np.concatenate([_widened(part.mean_BW, width, np.nan) for part in parts]),
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


def _mean(sums: Floats, counts: Ints) -> Floats:
    means: Floats = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    return means

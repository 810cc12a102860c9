"""Bins of steps with the mean and the extremes of each worker.

A step is a bin of one. Bins merge exactly: counts and sums add up, the smallest and the largest
value stay. Non-finite values count as missing.

Shapes: T steps, B bins, W workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
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

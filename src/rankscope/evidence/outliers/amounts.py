"""The amount of data of each worker: label tokens, samples, length of sequences, padding.

These are compared like losses and gradients, with three exceptions. Small differences count as
none: a sampler that sorts by length deals the longest of each few samples to the same worker,
always. A difference that most steps do not show is forgotten: an epoch's last batch is short, on
the same worker each time. Neither depends on the rank, so the workers remain exchangeable. And a
difference without a majority is a note: lengths that differ by domain are the rule. Losses and
gradients are compared whatever the amounts.

Legend of shapes: S signals, W workers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.detector import FaultEvidence
from rankscope.bus.evidence import Compares
from rankscope.bus.finding import Severity
from rankscope.bus.step import MISSING_INT
from rankscope.bus.steps import Step
from rankscope.evidence.outliers.blame import OutlierSearch
from rankscope.evidence.outliers.parts import Levelled, total_signals
from rankscope.evidence.outliers.words import Fault
from rankscope.stats.arrays import Floats
from rankscope.stats.budget import AMOUNTS

FACTOR = 1.75
"""Ratio to the median, or one over it, from which an amount counts as different."""

DIFFERENCE = 0.25
"""The same for shares, as a difference."""


class UnequalAmounts(OutlierSearch):
    """Finds workers whose amount of data differs from the others'.

    Args:
        num_workers: W.
        hosts: Host of each rank; empty when unknown.
    """

    FAMILY = AMOUNTS
    SHARE = 1.0
    KEY = "amount"
    TIE = "amounts-differ"

    def __init__(self, num_workers: int, hosts: Sequence[str] = ()) -> None:
        self._amounts = Levelled(num_workers, total_signals(Compares.AMOUNTS))
        super().__init__(num_workers, self._amounts, hosts)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report faults that begin, change, grow or heal."""
        if self._num_workers < 2:
            return ()
        self._steps += 1
        workers = step.gathered.workers
        # The amount of a repeated batch is no new draw.
        usable_W = step.recurrence.ages_W == 0
        values_SW, different = self._levels(workers, usable_W)
        self._amounts.see(values_SW, usable_W, step.gathered.step, different=different)
        return self._find(step.gathered)

    def _levels(
        self, workers: Mapping[str, NDArray[np.generic]], usable_W: NDArray[np.bool_]
    ) -> tuple[Floats, bool]:
        """Return the values of all signals, and whether some differ from most."""
        signals = self._amounts.signals
        values_SW = np.array([_known(workers[signal.name], signal.name) for signal in signals])
        values_SW[:, ~usable_W] = np.nan
        rows = zip(values_SW, signals, strict=True)
        differ = [_level(row_W, relative=one.how.relative) for row_W, one in rows]
        return values_SW, any(differ)

    def _evidence(self, fault: Fault) -> FaultEvidence:
        evidence = super()._evidence(fault)
        return replace(evidence, severity=Severity.NOTE) if fault.tie else evidence


def _known(column_W: NDArray[np.generic], name: str) -> Floats:
    """Return a column with NaN where it is unknown; 0 samples are unknown, too."""
    unknown = 0 if name == "num_samples" else MISSING_INT
    values_W: Floats = np.where(column_W == unknown, np.nan, column_W).astype(np.float64)
    return values_W


def _level(values_W: Floats, *, relative: bool) -> bool:
    """Set values near the median to the median; return whether others are left."""
    present = np.flatnonzero(np.isfinite(values_W))
    if len(present) < 2 or (values_W[present] == values_W[present[0]]).all():
        return False
    with np.errstate(divide="ignore"):
        own = np.log(values_W[present]) if relative else values_W[present]
    middle = np.median(own)
    limit = math.log(FACTOR) if relative else DIFFERENCE
    if len(values_W) == 2:  # the middle lies between them
        limit /= 2
    with np.errstate(invalid="ignore"):
        near = ~(np.abs(own - middle) >= limit)
    values_W[present[near]] = np.median(values_W[present])
    return not near.all()

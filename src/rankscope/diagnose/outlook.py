"""Comparing workers in many steps at once: all that does not wait for the verdict on a step.

It holds for steps in which no worker is set apart, and each one has a value of everything. Others
are compared one by one, with the same result, bit for bit.

Legend of shapes: S steps that are handled together, T of them in a run, R signals, W workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.core.arrays import Floats, Ints
from rankscope.core.bets import AT_ONCE
from rankscope.core.step import StepReport
from rankscope.diagnose.evidence import Observation, Stretch
from rankscope.diagnose.outlier_parts import Part, PartAhead, groups_of, log_sizes, totals_of
from rankscope.diagnose.repeats import RecentBatches


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of steps of which was looked ahead: from the one of index ``first`` on."""

    first: int
    length: int
    totals: PartAhead
    groups: PartAhead | None


class Outlook:
    """Looks ahead in the steps that are handled together.

    Args:
        totals: Compares the workers as wholes.
        batches: Remembers the workers' batches.

    Attributes:
        no_repeats: Whether none of these steps has a batch that a worker had before; then
            ``batches`` has seen them all.
    """

    def __init__(self, totals: Part, batches: RecentBatches) -> None:
        self._totals = totals
        self._batches = batches
        self._stretch: Stretch | None = None
        self._comparable: list[bool] = []
        self._run: _Run | None = None
        self.no_repeats = False

    def take(self, step: Observation, groups: Part | None) -> bool:
        """Take a step in which no worker is set apart.

        Args:
            step: The step.
            groups: Compares the workers' groups; None before any was seen.

        Returns:
            Whether it was taken; else it has to be compared by itself.
        """
        run, stretch = self._run, self._stretch
        if run is None or not run.first <= step.index < run.first + run.length:
            if stretch is None or not self._comparable[step.index]:
                return False
            run = self._run = self._look_ahead(stretch, step.index, groups)
        if run is None:
            return False
        at, number = step.index - run.first, step.gathered.step
        self._totals.take(run.totals, at, number)
        if run.groups is not None and groups is not None:
            groups.take(run.groups, at, number)
        return True

    def forget(self) -> None:
        """Forget what was seen ahead: a worker is set apart."""
        self._run = None

    def begin(self, stretch: Stretch) -> None:
        """Take the steps that are handled together from now on."""
        self._stretch = self._run = None
        self.no_repeats = False
        if len(stretch.reports) < 2:
            return
        self.no_repeats = self._batches.observe_many(stretch.column("batch_digest"))
        if not self.no_repeats:
            return
        self._stretch = stretch
        self._comparable = [
            stretch.summary("alike", "num_samples", index) and stretch.samples.all_differ(index)
            for index in range(len(stretch.reports))
        ]

    def _look_ahead(self, stretch: Stretch, first: int, groups: Part | None) -> _Run | None:
        reports = self._alike(stretch, first, groups)
        totals_TRW, rows = self._totals_of(reports)
        plain_T = self._totals.plain(totals_TRW, rows)
        in_groups = [groups_of(report) for report in reports]
        groups_TRW = np.stack([one for one in in_groups if one is not None] or [np.empty((0, 0))])
        group_rows = np.arange(groups_TRW.shape[1])
        if len(group_rows):
            if groups is None or groups.group_names != list(reports[0].gathered.groups):
                return None  # they are new
            plain_T = plain_T & groups.plain(groups_TRW, group_rows)
        length = len(reports) if plain_T.all() else int(plain_T.argmin())
        if length < 2:
            return None
        sizes_TW = log_sizes(stretch.column("loss_weight")[first : first + length])
        return _Run(
            first,
            length,
            self._totals.look_ahead(totals_TRW[:length], rows, sizes_TW),
            groups.look_ahead(groups_TRW[:length], group_rows, sizes_TW)
            if groups is not None and len(group_rows)
            else None,
        )

    def _totals_of(self, reports: Sequence[StepReport]) -> tuple[Floats, Ints]:
        """Return what steps that are alike measure of workers ``[T, R, W]``, and which signals."""
        signals = self._totals.signals
        values = [totals_of(report, signals) for report in reports]
        rows = [index for index, one in enumerate(values[0]) if one is not None]
        measured = [[row_W for row_W in one if row_W is not None] for one in values]
        return np.array(measured, np.float64), np.array(rows)

    def _alike(self, stretch: Stretch, first: int, groups: Part | None) -> list[StepReport]:
        """Return the steps from one on that measure the same, as many as go together."""
        reports = stretch.reports
        kind = self._kind(reports[first])
        alone = groups is None or not reports[first].observed
        rows = len(self._totals.signals if alone or groups is None else groups.signals)
        most = max(2, AT_ONCE // (rows * reports[first].gathered.num_workers))
        end = first + 1
        while (
            end < min(len(reports), first + most)
            and self._comparable[end]
            and self._kind(reports[end]) == kind
        ):
            end += 1
        return list(reports[first:end])

    def _kind(self, report: StepReport) -> tuple[object, ...]:
        """Return what a step measures."""
        measured = [one is None for one in totals_of(report, self._totals.signals)]
        norms, cosines = report.gathered.group_norms_WG, report.group_cosine_rest_WG
        groups = report.observed, norms is None, cosines is None, report.gathered.groups
        return (*measured, *(groups if report.observed else ()))

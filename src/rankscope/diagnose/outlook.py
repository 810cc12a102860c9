"""Comparing workers in many steps at once: all that does not wait for the verdict on a step.

It holds for steps in which no worker is set apart, and each one has a value of everything. Others
are compared one by one, with the same result, bit for bit.

Legend of shapes: S steps that are handled together, T of them in a run, R signals, W workers.
"""

from dataclasses import dataclass

import numpy as np

from rankscope.core.arrays import Floats
from rankscope.core.bets import AT_ONCE
from rankscope.core.step import StepReport
from rankscope.diagnose.evidence import Observation, Stretch
from rankscope.diagnose.outlier_parts import Part, PartAhead, log_sizes
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
        gathered = reports[0].gathered
        totals_TRW = np.stack([_totals(report) for report in reports])
        plain_T = self._totals.plain(totals_TRW)
        groups_TRW = None
        if gathered.observed and gathered.group_norms_WG is not None and len(gathered.groups) > 1:
            if groups is None or groups.group_names != list(gathered.groups):
                return None  # they are new
            groups_TRW = np.stack([_groups(report) for report in reports])
            plain_T = plain_T & groups.plain(groups_TRW)
        length = len(reports) if plain_T.all() else int(plain_T.argmin())
        if length < 2:
            return None
        sizes_TW = log_sizes(stretch.column("loss_weight")[first : first + length])
        return _Run(
            first,
            length,
            self._totals.look_ahead(totals_TRW[:length], sizes_TW),
            None
            if groups is None or groups_TRW is None
            else groups.look_ahead(groups_TRW[:length], sizes_TW),
        )

    def _alike(self, stretch: Stretch, first: int, groups: Part | None) -> list[StepReport]:
        """Return the steps from one on that measure the same, as many as go together."""
        reports = stretch.reports
        kind = _kind(reports[first])
        rows = 3 if groups is None or not reports[first].observed else len(groups.signals)
        most = max(2, AT_ONCE // (rows * reports[first].gathered.num_workers))
        end = first + 1
        while (
            end < min(len(reports), first + most)
            and self._comparable[end]
            and _kind(reports[end]) == kind
        ):
            end += 1
        return list(reports[first:end])


def _kind(report: StepReport) -> tuple[object, ...]:
    """Return what a step measures."""
    gathered = report.gathered
    if not gathered.observed:
        return (False,)
    cosines = "cosine_rest" in report.derived, report.group_cosine_rest_WG is None
    return True, *cosines, gathered.group_norms_WG is None, gathered.groups


def _totals(report: StepReport) -> Floats:
    """Return what is compared of workers as wholes ``[R, W]``."""
    workers = report.gathered.workers
    if not report.observed:
        return np.array([workers["loss"]])
    rows = [workers["loss"], workers["grad_norm"]]
    if "cosine_rest" in report.derived:
        rows.append(report.derived["cosine_rest"])
    return np.array(rows)


def _groups(report: StepReport) -> Floats:
    """Return what is compared of groups ``[R, W]``."""
    norms_WG, cosines_WG = report.gathered.group_norms_WG, report.group_cosine_rest_WG
    assert norms_WG is not None
    parts = [norms_WG.T] if cosines_WG is None else [norms_WG.T, cosines_WG.T]
    return np.concatenate(parts)

"""Workers that differ from the others: which, since when, in what, and by how much.

Each step compares the workers in loss, gradient norm and direction, and in norm and direction of
every group of parameters (:mod:`rankscope.core.exchangeability`).
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rankscope.core.budget import OUTLIERS
from rankscope.core.canary import Verdict, judge, results_of
from rankscope.core.state import State, StateError
from rankscope.core.step import GatheredStep
from rankscope.diagnose.blame import OutlierSearch
from rankscope.diagnose.evidence import Evidence, Observation
from rankscope.diagnose.gross import GrossOutliers, GrossValues
from rankscope.diagnose.outlier_parts import (
    Part,
    group_signals,
    groups_of,
    log_sizes,
    of_usual_size,
    total_signals,
    totals_of,
)
from rankscope.diagnose.outlook import Outlook
from rankscope.diagnose.repeats import RecentBatches


class WorkerOutliers(OutlierSearch):
    """Finds workers that differ from the others.

    Args:
        num_workers: W.
        hosts: Host of each rank; empty when unknown.
    """

    FAMILY, SHARE = OUTLIERS, 0.5
    KEY, TIE = "outlier", "workers-differ"

    def __init__(self, num_workers: int, hosts: Sequence[str] = ()) -> None:
        super().__init__(num_workers, Part(num_workers, total_signals()), hosts)
        self._batches = RecentBatches(num_workers)
        signals = self._totals.signals
        self._gross = GrossOutliers([signal.how.label for signal in signals], num_workers)
        self._values = GrossValues(num_workers)
        self._outlook = Outlook(self._totals, self._batches)
        self._left_out: list[int] = []

    def observe(self, step: Observation) -> Iterable[Evidence]:
        """Take one step; speaks of faults that begin, change, grow or heal."""
        if self._num_workers < 2:
            return ()
        self._steps += 1
        if step.index == 0:
            self._outlook.begin(step.stretch)
        if self.set_apart:
            self._outlook.forget()
            self._feed(step)
        elif self._outlook.take(step, self._groups):
            self._left_out = []
        else:
            self._feed(step)
        self._see_canary(step.gathered)
        found = self._find(step.gathered)
        gross = self._gross.observe(self._z_of_unsuspected(), step.gathered.step)
        values = self._values.observe(step.gathered, self.not_compared)
        return [*values, *gross, *found]

    @property
    def not_compared(self) -> tuple[int, ...]:
        """Workers that differ, or could not be compared in the last step."""
        return tuple(sorted({*self.set_apart, *self._left_out}))

    def _see_canary(self, gathered: GatheredStep) -> None:
        """Learn from a canary that a worker which differs in most steps has other data."""
        results = results_of(gathered) if self.set_apart else None
        if results is None or judge(results).verdict is not Verdict.DATA:
            return
        suspect = results.suspect
        for fault in self._faults:
            if fault.active == fault.ranks == [suspect] and suspect in self.steadily_apart:
                fault.agreed, fault.told = gathered.step, 0  # it is told again

    def _z_of_unsuspected(self) -> NDArray[np.float32]:
        z_SW, apart = self._totals.test.z_SU, list(self.set_apart)
        if apart:
            z_SW = z_SW.copy()
            z_SW[:, apart] = 0
        return z_SW

    def state(self) -> State:
        """Return a copy of all that it remembers."""
        groups = self._groups
        return {
            **super().state(),
            "groups": None if groups is None else groups.state(),
            "group_names": [] if groups is None else groups.group_names,
            "batches": self._batches.state(),
            "gross": self._gross.state(),
            "values": self._values.state(),
        }

    def restore(self, state: State) -> None:
        """Remember what a detector of as many workers remembered.

        Raises:
            StateError: The state does not fit.
        """
        super().restore(state)
        try:
            if state["groups"] is not None:
                names = state["group_names"]
                self._groups = Part(self._num_workers, group_signals(names))
                self._groups.restore(state["groups"])
            self._batches.restore(state["batches"])
            self._gross.restore(state["gross"])
            self._values.restore(state["values"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"this is not the state of a search for outliers: {error}") from error

    def _feed(self, step: Observation) -> None:
        gathered, report = step.gathered, step.report
        # Who knows a batch by heart, or has one of another size (at the end of an epoch), is
        # unlike the others for no fault.
        usable_W = of_usual_size(gathered.workers["num_samples"])
        if not self._outlook.no_repeats:
            usable_W = usable_W & ~self._batches.observe(gathered.workers["batch_digest"])
        for group in step.identical:  # one of them speaks for all
            usable_W[list(group[1:])] = False
        self._left_out = (~usable_W).nonzero()[0].tolist()
        copies, unknown_W = bool(step.identical), np.full(self._num_workers, np.nan)
        values = totals_of(report, self._totals.signals, copies=copies)
        totals_SW = np.array([unknown_W if one is None else one for one in values])
        sizes_W = log_sizes(gathered.workers["loss_weight"])
        self._totals.observe(totals_SW, usable_W, sizes_W, gathered.step)
        groups_RW = groups_of(report, copies=copies)
        if groups_RW is None:
            return
        if self._groups is None or self._groups.group_names != list(gathered.groups):
            self._groups = Part(self._num_workers, group_signals(gathered.groups))
            for worker in self.set_apart:
                self._groups.test.set_unit_apart(worker)
        self._groups.observe(groups_RW, usable_W, sizes_W, gathered.step)

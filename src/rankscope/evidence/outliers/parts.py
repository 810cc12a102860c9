"""The compared signals of workers: their totals, or their groups of parameters.

The effect of each worker's amount of data is removed first. The more label tokens a batch holds,
the smaller is the noise of its gradient; and long texts are other texts. A worker whose shard holds
the longer ones differs without fault. In logarithms a power of the size is a straight line. Its
slope is learnt for each signal from the steps before: each unit's own by least squares, and of
these the median over units, so that a fault of one unit does not become the rule. The slope is one
for all units and comes from the past alone. Where values and sizes are exchangeable jointly, so are
the adjusted values.

Legend of shapes: T steps, S signals, U units (workers).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.bus.evidence import Column, Compared, Compares, Source, Table
from rankscope.bus.step import StepReport
from rankscope.bus.steps import Step
from rankscope.evidence import compared_columns, find_column
from rankscope.stats.arrays import Bools, Floats, Ints, median, median_of_known
from rankscope.stats.bets import Rows, worker_bets
from rankscope.stats.exchangeability import ExchangeabilityTest, as_slice
from rankscope.stats.state import Stateful

_KEPT = 0.99
"""Decay of a step's weight from one step to the next: about 100 steps count."""
_FEWEST = 3
_MOST_KEPT = 16  # steps without a difference, after as many with one, until those are forgotten
_LEAST_SQUARES = 0.01
"""Sum of squared sizes below which a slope counts as none."""


@dataclass(frozen=True, slots=True)
class WorkerSignal(Stateful):
    """A signal of the worker as a whole, or of one of its groups of parameters."""

    name: str  # of a column in which workers are compared
    group: str = ""  # group of parameters; empty for the worker as a whole

    @property
    def declared(self) -> Column:
        """The declaration of its column."""
        return find_column(Table.GROUPS if self.group else Table.WORKERS, self.name)

    @property
    def how(self) -> Compared:
        """How it is compared."""
        assert self.declared.compared is not None
        return self.declared.compared


class SizeEffect(Stateful):
    """Learns how signals follow sizes, and removes the effect, in constant memory.

    ``relative_S``: whether a signal follows a power of the size; if not, its logarithm.
    """

    SETTINGS = ("_relative_S",)

    def __init__(self, relative_S: Bools, num_units: int) -> None:
        self._relative_S = relative_S
        self._products_SU = np.zeros((len(relative_S), num_units))
        self._squares_SU = np.zeros((len(relative_S), num_units))

    def adjust(self, values_TSU: Floats, sizes_TU: Floats) -> Floats:
        """Return the values as of units of the median size, and learn from each step in turn.

        ``sizes_TU`` are logarithms. The values stay as they are in steps in which a size is unknown
        or none differs, and of two units: a fault of one of them would look like a rule.
        """
        if sizes_TU.shape[1] < _FEWEST:
            return values_TSU
        measured_TSU = np.isfinite(values_TSU)
        relative_TU, differ_T = _relative_sizes(
            np.logical_or.reduce(measured_TSU, axis=1), sizes_TU
        )
        if not differ_T.any():
            return values_TSU
        rows = as_slice(np.flatnonzero(measured_TSU.any(axis=(0, 2))))
        adjusted_TSU = values_TSU.copy()
        adjusted_TSU[:, rows] = self._adjusted(
            values_TSU[:, rows], measured_TSU[:, rows], relative_TU, differ_T, rows
        )
        return adjusted_TSU

    def _adjusted(
        self,
        values_TSU: Floats,
        measured_TSU: Bools,
        relative_TU: Floats,
        differ_T: Bools,
        rows: Rows,
    ) -> Floats:
        """Return the same for the signals of these rows, of which each has some value."""
        relative_S1 = self._relative_S[rows, None]
        with np.errstate(invalid="ignore", divide="ignore"):
            follows_TSU = np.where(relative_S1, np.log(values_TSU), values_TSU)
        known_TSU = np.isfinite(follows_TSU)
        follows_TSU = np.where(known_TSU, follows_TSU, np.nan)
        follows_TSU -= median_of_known(follows_TSU)[:, :, None]
        products_TSU = np.where(known_TSU, follows_TSU * relative_TU[:, None], 0.0)
        squares_TSU = known_TSU * (relative_TU**2)[:, None]
        learns_TS = measured_TSU.any(axis=2) & differ_T[:, None]
        kept_TS1 = np.where(learns_TS, _KEPT, 1.0)[:, :, None]
        slopes_TSU = np.empty_like(values_TSU)
        learnt_SU = self._products_SU[rows]
        squares_SU = self._squares_SU[rows]
        for at, kept_S1 in enumerate(kept_TS1):
            slopes_TSU[at] = learnt_SU / (squares_SU + _LEAST_SQUARES)
            learnt_SU *= kept_S1
            learnt_SU += products_TSU[at]
            squares_SU *= kept_S1
            squares_SU += squares_TSU[at]
        self._products_SU[rows] = learnt_SU
        self._squares_SU[rows] = squares_SU
        expected_TSU = median(slopes_TSU)[:, :, None] * relative_TU[:, None]
        with np.errstate(over="ignore", invalid="ignore"):  # not finite is not compared
            free_TSU = np.where(
                relative_S1, values_TSU * np.exp(-expected_TSU), values_TSU - expected_TSU
            )
        return np.where(differ_T[:, None, None], free_TSU, values_TSU)


def _relative_sizes(present_TU: Bools, sizes_TU: Floats) -> tuple[Floats, Bools]:
    """Return sizes over their median, as logarithms, and in which steps they are of use."""
    sizes_TU = np.where(present_TU, sizes_TU, np.nan)
    known_T = (np.isfinite(sizes_TU) == present_TU).all(axis=1)
    enough_T = np.count_nonzero(present_TU, axis=1) >= _FEWEST
    smallest_T = np.fmin.reduce(sizes_TU, axis=1)
    largest_T = np.fmax.reduce(sizes_TU, axis=1)
    differ_T = known_T & enough_T & (smallest_T != largest_T)
    relative_TU = sizes_TU - median_of_known(sizes_TU)[:, None]
    return np.where(present_TU & differ_T[:, None], relative_TU, 0.0), differ_T


class SignalSet(Stateful):
    """The signals of workers as wholes, or those of their groups."""

    SETTINGS = ("signals", "group_names")

    def __init__(self, num_workers: int, signals: Sequence[WorkerSignal]) -> None:
        self.signals = tuple(signals)
        self.group_names = list(dict.fromkeys(signal.group for signal in signals if signal.group))
        equal_S = np.full(len(signals), 1 / len(signals))
        relative_S = np.array([signal.how.relative for signal in signals])
        self.test = ExchangeabilityTest(num_workers, equal_S, relative_S, worker_bets())
        self._size_effect = SizeEffect(relative_S, num_workers)

    def observe(self, values_TSW: Floats, sizes_TW: Floats, steps: Sequence[int]) -> Iterator[int]:
        """Process consecutive steps, one with each iteration; see :class:`ExchangeabilityTest`."""
        return self.test.observe(self._size_effect.adjust(values_TSW, sizes_TW), steps)


class Levelled(SignalSet):
    """Signals without a difference in most steps, since values near the usual one count as equal.

    Such steps are not compared, and enough of them erase the memory.
    """

    def __init__(self, num_workers: int, signals: Sequence[WorkerSignal]) -> None:
        super().__init__(num_workers, signals)
        self._shown = 0
        self._unknown_W = np.full(num_workers, np.nan)

    def see(self, values_SW: Floats, usable_W: Bools, step: int, *, different: bool) -> None:
        """Process a step; ``different`` if some value differs from the usual one."""
        self._shown = min(self._shown + 1, _MOST_KEPT) if different else self._shown - 1
        if self._shown < 0:
            self._shown = 0
            self.test.start_anew()
        if different or self.test.unlike:
            values = np.where(usable_W, values_SW, np.nan)
            for _ in self.observe(values[None], self._unknown_W[None], [step]):
                pass


def total_signals(by: Compares = Compares.RESULTS) -> list[WorkerSignal]:
    """Return the signals of a worker as a whole in which one search compares the workers."""
    declared = compared_columns(Table.WORKERS)
    return [
        WorkerSignal(s.name) for s in declared if s.compared is not None and s.compared.by is by
    ]


def group_signals(groups: Sequence[str]) -> list[WorkerSignal]:
    """Return the signals of groups of parameters: all norms, then all directions."""
    declared = compared_columns(Table.GROUPS)
    return [WorkerSignal(signal.name, name) for signal in declared for name in groups]


def totals_of(step: Step, signals: Sequence[WorkerSignal]) -> Floats:
    """Return the values of workers as wholes ``[S, W]``; NaN if unknown, or of copies."""
    report = step.report
    derived = {} if step.identical else report.derived
    values_SW = np.full((len(signals), report.gathered.num_workers), np.nan)
    for values_W, signal in zip(values_SW, signals, strict=True):
        if report.observed or not signal.how.observed:
            local = signal.declared.source is Source.LOCAL
            values_W[:] = (report.gathered.workers if local else derived).get(signal.name, np.nan)
    return values_SW


def compared_groups(report: StepReport) -> list[str]:
    """Return the groups in which a step can be compared; empty without two of them."""
    groups = report.gathered.groups
    has_norms = report.observed and report.gathered.group_norms_WG is not None
    return list(groups) if has_norms and len(groups) >= 2 else []


def groups_of(step: Step, num_signals: int) -> Floats:
    """Return the values of groups ``[S, W]``, norms first, NaN where there is none."""
    norms_WG = step.gathered.group_norms_WG
    cosines_WG = step.report.group_cosine_rest_WG
    assert norms_WG is not None, "compared_groups looks"
    values_SW = np.full((num_signals, step.gathered.num_workers), np.nan)
    num_groups = norms_WG.shape[1]
    values_SW[:num_groups] = norms_WG.T
    if cosines_WG is not None and not step.identical:
        values_SW[num_groups:] = cosines_WG.T
    return values_SW


def of_usual_size(sizes_W: Ints) -> Bools:
    """Return which workers have the batch size of the majority; all without a majority."""
    if np.count_nonzero(sizes_W == sizes_W[0]) == len(sizes_W):
        return np.ones(len(sizes_W), bool)
    sizes, counts = np.unique(sizes_W, return_counts=True)
    usual = sizes[counts.argmax()]
    if 2 * counts.max() <= len(sizes_W):
        return np.ones(len(sizes_W), bool)
    same: Bools = sizes_W == usual
    return same

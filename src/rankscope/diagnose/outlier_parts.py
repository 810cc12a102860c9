"""What of the workers is compared: their totals, or their groups of parameters.

What follows from how much each worker was given is taken away first. The more label tokens a batch
holds, the smaller is the noise of its gradient; and long texts are other texts. A worker whose
shard holds the longer ones is unlike the others for no fault. In logarithms a power of the size is
a straight line. Its slope is learnt for each signal from the steps before: each unit's own by least
squares, and of these the median over units, so that what is wrong with one unit is not taken for a
rule. The slope is one for all units and comes from the past alone. Where values and sizes are
exchangeable jointly, so is what is left of the values.

Legend of shapes: S signals, R signals of a step, U units (workers).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.columns import Compares, Source, Table
from rankscope.core.arrays import Floats, Ints, median
from rankscope.core.bets import Rows, worker_bets
from rankscope.core.exchangeability import Ahead, ExchangeabilityTest, as_slice
from rankscope.core.state import Stateful
from rankscope.core.step import StepReport
from rankscope.diagnose.outlier_words import WorkerSignal
from rankscope.evidence import compared_columns

_KEPT = 0.99
"""What is left of a step's weight in the next one: about 100 steps count."""
_FEWEST = 3
_MOST_KEPT = 16  # steps that show nothing, after as many that do, until they are forgotten
_LEAST_SQUARES = 0.01
"""Sum of squared sizes below which a slope counts as none."""


class SizeEffect(Stateful):
    """Learns how signals follow sizes, and frees them from it, in constant memory.

    Args:
        relative_S: Whether a signal follows a power of the size; if not, its logarithm.
        num_units: U.
    """

    SETTINGS = ("_relative_S",)

    def __init__(self, relative_S: NDArray[np.bool_], num_units: int) -> None:
        self._relative_S = relative_S
        self._products_SU = np.zeros((len(relative_S), num_units))
        self._squares_SU = np.zeros((len(relative_S), num_units))

    def take_away(self, values_RU: Floats, rows: Rows, sizes_U: Floats) -> Floats:
        """Return the values of one step as of units of the median size, then learn from the step.

        Args:
            values_RU: Values of the signals named by ``rows``, NaN where a unit has none.
            rows: The signals that this step measures.
            sizes_U: Logarithm of the size of what each unit was given; NaN where it is unknown.

        Returns:
            The values themselves where a size is unknown or none differs, and of two units: what
            is wrong with one of them would look like a rule.
        """
        present_U = np.isfinite(values_RU).any(axis=0)
        sizes = sizes_U if present_U.all() else sizes_U[present_U]
        if len(sizes) < _FEWEST or not np.isfinite(sizes).all() or sizes.min() == sizes.max():
            return values_RU
        relative_U = np.where(present_U, sizes_U - median(sizes), 0.0)
        slope_R1 = self._slopes(rows)[:, None]
        relative_R1 = self._relative_S[rows][:, None]
        self._learn(values_RU, relative_R1, relative_U, rows)
        expected_RU = slope_R1 * relative_U
        with np.errstate(over="ignore", invalid="ignore"):  # not finite is not compared
            return np.where(relative_R1, values_RU * np.exp(-expected_RU), values_RU - expected_RU)

    def look_ahead(
        self, values_TRU: Floats, rows: Rows, sizes_TU: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Return what :meth:`take_away` would of T steps one after the other, and learn nothing.

        Args:
            values_TRU: Finite values; positive ones of signals that follow a power of the size.
            rows: The signals that these steps measure.
            sizes_TU: Logarithms of sizes.

        Returns:
            The values free of sizes, and what is known after each step, for :meth:`know`.
        """
        products_TRU, squares_TRU = np.empty_like(values_TRU), np.empty_like(values_TRU)
        products, squares = self._products_SU[rows], self._squares_SU[rows]
        differ_T = np.isfinite(sizes_TU).all(axis=1)
        differ_T &= sizes_TU.min(axis=1) != sizes_TU.max(axis=1)
        if sizes_TU.shape[1] < _FEWEST or not differ_T.any():
            products_TRU[:], squares_TRU[:] = products, squares
            return values_TRU, products_TRU, squares_TRU
        relative_R1 = self._relative_S[rows][:, None]
        away_TU = np.where(differ_T[:, None], sizes_TU - median(sizes_TU)[:, None], 0.0)
        follows = np.where(relative_R1, np.log(np.where(relative_R1, values_TRU, 1.0)), values_TRU)
        follows -= median(follows)[:, :, None]
        follows *= away_TU[:, None]
        before = np.empty_like(values_TRU)
        for step, differ in enumerate(differ_T.tolist()):
            before[step] = products / (squares + _LEAST_SQUARES)
            if differ:
                products = _KEPT * products + follows[step]
                squares = _KEPT * squares + away_TU[step] ** 2
            products_TRU[step], squares_TRU[step] = products, squares
        expected = median(before)[:, :, None] * away_TU[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            free = np.where(relative_R1, values_TRU * np.exp(-expected), values_TRU - expected)
        free = np.where(differ_T[:, None, None], free, values_TRU)
        return free, products_TRU, squares_TRU

    def know(self, products_RU: Floats, squares_RU: Floats, rows: Rows) -> None:
        """Know what :meth:`look_ahead` returned for a step."""
        self._products_SU[rows] = products_RU
        self._squares_SU[rows] = squares_RU

    def _slopes(self, rows: Rows) -> Floats:
        slopes_RU = self._products_SU[rows] / (self._squares_SU[rows] + _LEAST_SQUARES)
        slopes: Floats = median(slopes_RU)
        return slopes

    def _learn(
        self, values_RU: Floats, relative_R1: NDArray[np.bool_], relative_U: Floats, rows: Rows
    ) -> None:
        with np.errstate(invalid="ignore", divide="ignore"):
            follows_RU = np.where(relative_R1, np.log(values_RU), values_RU)
        known_RU = np.isfinite(follows_RU)
        middle_R = _medians(follows_RU, known_RU)
        away_RU = np.where(known_RU, follows_RU - middle_R[:, None], 0.0)
        squares_RU = known_RU * relative_U**2
        self._products_SU[rows] = _KEPT * self._products_SU[rows] + away_RU * relative_U
        self._squares_SU[rows] = _KEPT * self._squares_SU[rows] + squares_RU


def _medians(values_RU: Floats, known_RU: NDArray[np.bool_]) -> Floats:
    """Return the median of each row's known values; 0 where none is known."""
    medians_R = np.zeros(len(values_RU))
    if known_RU.all():  # nanmedian takes much longer
        medians_R[:] = median(values_RU)
    else:
        some_R = known_RU.any(axis=1)
        values_RU = np.where(known_RU, values_RU, np.nan)
        medians_R[some_R] = np.nanmedian(values_RU[some_R], axis=1)
    return medians_R


@dataclass(frozen=True, slots=True)
class PartAhead:
    """What a part will take of the next steps, of the signals named by ``rows``."""

    rows: Rows
    products_TRU: Floats
    squares_TRU: Floats
    test: Ahead


class Part(Stateful):
    """The signals of workers as wholes, or those of their groups.

    Attributes:
        signals: The signals.
        group_names: Their groups of parameters, in order.
        test: Compares the workers in them.
    """

    SETTINGS = ("signals", "group_names", "_relative_S")

    def __init__(self, num_workers: int, signals: Sequence[WorkerSignal]) -> None:
        self.signals = tuple(signals)
        self.group_names = list(dict.fromkeys(signal.group for signal in signals if signal.group))
        equal_S = np.full(len(signals), 1 / len(signals))
        relative_S = np.array([signal.how.relative for signal in signals])
        self._relative_S = relative_S
        self.test = ExchangeabilityTest(num_workers, equal_S, relative_S, worker_bets())
        self._size_effect = SizeEffect(relative_S, num_workers)

    def observe(
        self, values_SW: Floats, usable_W: NDArray[np.bool_], sizes_W: Floats, step: int
    ) -> None:
        """Take one step's values of all signals, NaN where there is none, free of batch sizes."""
        values = np.where(usable_W, values_SW, np.nan)
        rows = np.logical_or.reduce(np.isfinite(values), axis=1).nonzero()[0]
        if len(rows):
            free = self._size_effect.take_away(values[rows], rows, sizes_W)
            self.test.observe(free, rows, step)

    def look_ahead(self, values_TRU: Floats, rows: Ints, sizes_TU: Floats) -> "PartAhead":
        """Compute what :meth:`observe` would of T steps; nothing has changed yet.

        Args:
            values_TRU: Values that are :meth:`plain`.
            rows: Indices of the signals that these steps measure, ascending.
            sizes_TU: Logarithms of sizes.
        """
        measured = as_slice(rows)
        free, products, squares = self._size_effect.look_ahead(values_TRU, measured, sizes_TU)
        return PartAhead(measured, products, squares, self.test.look_ahead(free, rows))

    def take(self, ahead: "PartAhead", at: int, step: int) -> None:
        """Take one of the steps of which was looked ahead, in their order."""
        self._size_effect.know(ahead.products_TRU[at], ahead.squares_TRU[at], ahead.rows)
        self.test.take(ahead.test, at, step)

    def plain(self, values_TRU: Floats, rows: Ints) -> NDArray[np.bool_]:
        """Return in which steps ``[T]`` all values are finite, and positive where that matters."""
        least_R11 = np.where(self._relative_S[rows], 0.0, -np.inf)[:, None]
        plain_TRU = (values_TRU > least_R11) & (values_TRU < np.inf)
        return np.asarray(plain_TRU.all(axis=(1, 2)))


class Levelled(Part):
    """Signals in which most steps show nothing, since what is near the usual value counts as it.

    Such steps are not compared, and enough of them let all be forgotten.
    """

    def __init__(self, num_workers: int, signals: Sequence[WorkerSignal]) -> None:
        super().__init__(num_workers, signals)
        self._shown = 0
        self._unknown_W = np.full(num_workers, np.nan)

    def see(
        self, values_SW: Floats, usable_W: NDArray[np.bool_], step: int, *, different: bool
    ) -> None:
        """Take one step.

        Args:
            values_SW: Values of all signals, NaN where there is none.
            usable_W: Who is compared.
            step: Its number.
            different: Whether some value is another one than the usual one.
        """
        self._shown = min(self._shown + 1, _MOST_KEPT) if different else self._shown - 1
        if self._shown < 0:
            self._shown = 0
            self.test.start_anew()
        if different or self.test.set_apart:
            self.observe(values_SW, usable_W, self._unknown_W, step)


def total_signals(by: Compares = Compares.RESULTS) -> list[WorkerSignal]:
    """Return the signals of a worker as a whole in which one search compares the workers."""
    declared = compared_columns(Table.WORKERS)
    return [WorkerSignal(s) for s in declared if s.compared is not None and s.compared.by is by]


def group_signals(groups: Sequence[str]) -> list[WorkerSignal]:
    """Return the signals of groups of parameters: all norms, then all directions."""
    declared = compared_columns(Table.GROUPS)
    return [WorkerSignal(signal, name) for signal in declared for name in groups]


def totals_of(
    report: StepReport, signals: Sequence[WorkerSignal], *, copies: bool = False
) -> list[Floats | None]:
    """Return the values of each signal of workers as wholes, ``[W]``; None if not measured.

    Args:
        report: The step.
        signals: What :func:`total_signals` returns.
        copies: Whether some workers have the same batch. What compares a worker with all others
            says nothing then: copies agree with copies.
    """
    workers, derived = report.gathered.workers, {} if copies else report.derived
    return [
        None
        if signal.how.observed and not report.observed
        else (workers if signal.declared.source is Source.LOCAL else derived).get(signal.name)
        for signal in signals
    ]


def groups_of(report: StepReport, *, copies: bool = False) -> Floats | None:
    """Return the values of the signals of groups ``[R, W]``, norms first; None without groups."""
    norms_WG, cosines_WG = report.gathered.group_norms_WG, report.group_cosine_rest_WG
    if not report.observed or norms_WG is None or len(report.gathered.groups) < 2:
        return None
    return (
        norms_WG.T if cosines_WG is None or copies else np.concatenate([norms_WG.T, cosines_WG.T])
    )


def log_sizes(weights: Floats) -> Floats:
    """Return the logarithm of workers' label tokens, NaN where they are unknown."""
    return np.log(np.where(weights > 0, weights, np.nan))


def of_usual_size(sizes_W: Ints) -> NDArray[np.bool_]:
    """Return which workers have a batch of the size that most have; all, if most have none."""
    if np.count_nonzero(sizes_W == sizes_W[0]) == len(sizes_W):
        return np.ones(len(sizes_W), bool)
    sizes, counts = np.unique(sizes_W, return_counts=True)
    usual = sizes[counts.argmax()]
    if 2 * counts.max() <= len(sizes_W):
        return np.ones(len(sizes_W), bool)
    same: NDArray[np.bool_] = sizes_W == usual
    return same

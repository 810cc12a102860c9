"""What of the workers is compared: their totals, or their groups of parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.core.arrays import Floats, Ints
from rankscope.core.bets import worker_bets
from rankscope.core.exchangeability import Ahead, ExchangeabilityTest
from rankscope.core.sizes import SizeEffect
from rankscope.core.state import State
from rankscope.diagnose.outlier_words import Signal

TOTALS = (
    Signal("loss", "loss", relative=True),
    Signal("grad_norm", "gradient norm", relative=True),
    Signal("cosine_rest", "direction", relative=False),
)
"""The signals of a worker as a whole."""


@dataclass(frozen=True, slots=True)
class PartAhead:
    """What a part will take of the next steps."""

    products_TRU: Floats
    squares_TRU: Floats
    test: Ahead


class Part:
    """The signals of workers as wholes, or those of their groups.

    Attributes:
        signals: The signals.
        group_names: Their groups of parameters, in order.
        test: Compares the workers in them.
    """

    def __init__(self, num_workers: int, signals: Sequence[Signal]) -> None:
        self.signals = tuple(signals)
        self.group_names = list(dict.fromkeys(signal.group for signal in signals if signal.group))
        equal_S = np.full(len(signals), 1 / len(signals))
        relative_S = np.array([signal.relative for signal in signals])
        self._relative_S = relative_S
        self.test = ExchangeabilityTest(num_workers, equal_S, relative_S, worker_bets())
        self._size_effect = SizeEffect(relative_S, num_workers)

    def observe(
        self, values_SW: Floats, usable_W: NDArray[np.bool_], sizes_W: Floats, step: int
    ) -> None:
        """Take the first signals of one step, as many as were measured, free of batch sizes."""
        values = np.where(usable_W, values_SW, np.nan)
        rows = np.logical_or.reduce(np.isfinite(values), axis=1).nonzero()[0]
        if len(rows):
            free = self._size_effect.take_away(values[rows], rows, sizes_W)
            self.test.observe(free, rows, step)

    def look_ahead(self, values_TRU: Floats, sizes_TU: Floats) -> "PartAhead":
        """Compute what :meth:`observe` would of T steps; nothing has changed yet.

        Args:
            values_TRU: Values that are :meth:`plain`.
            sizes_TU: Logarithms of sizes.
        """
        rows = np.arange(values_TRU.shape[1])
        free, products, squares = self._size_effect.look_ahead(
            values_TRU, slice(0, len(rows)), sizes_TU
        )
        return PartAhead(products, squares, self.test.look_ahead(free, rows))

    def take(self, ahead: "PartAhead", at: int, step: int) -> None:
        """Take one of the steps of which was looked ahead, in their order."""
        rows = slice(0, ahead.products_TRU.shape[1])
        self._size_effect.know(ahead.products_TRU[at], ahead.squares_TRU[at], rows)
        self.test.take(ahead.test, at, step)

    def plain(self, values_TRU: Floats) -> NDArray[np.bool_]:
        """Return in which steps ``[T]`` all values are finite, and positive where that matters."""
        least_R11 = np.where(self._relative_S[: values_TRU.shape[1]], 0.0, -np.inf)[:, None]
        plain_TRU = (values_TRU > least_R11) & (values_TRU < np.inf)
        return np.asarray(plain_TRU.all(axis=(1, 2)))

    def state(self) -> State:
        """Return a copy of all that it remembers."""
        return {"test": self.test.state(), "sizes": self._size_effect.state()}

    def restore(self, state: State) -> None:
        """Remember what a part of the same workers and signals remembered.

        Raises:
            KeyError: Something is missing.
            StateError: The state does not fit.
        """
        self.test.restore(state["test"])
        self._size_effect.restore(state["sizes"])


def group_signals(groups: Sequence[str]) -> list[Signal]:
    """Return the signals of groups of parameters: all norms, then all directions."""
    return [
        *(Signal("grad_norm", "gradient norm", relative=True, group=name) for name in groups),
        *(Signal("cosine_rest", "direction", relative=False, group=name) for name in groups),
    ]


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

"""Label tokens of workers that differ: a fact beside the finding, no evidence of its own.

Legend of shapes: W workers.
"""

from collections.abc import Sequence

import numpy as np

from rankscope.stats.arrays import Floats
from rankscope.stats.state import Stateful

_TOKEN_STEPS = 8
_TOKENS_APART = 0.1  # of the logarithms, between two workers
_STANDARD_ERRORS = 5.0


class TokenCounts(Stateful):
    """How many label tokens each worker counts in a step, over the run."""

    SETTINGS = ("_num_workers",)

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._steps = 0
        self._tokens_W = np.zeros(num_workers)
        self._logs_W = np.zeros(num_workers)  # sums of the logarithm over that of the median
        self._squares_W = np.zeros(num_workers)

    def see(self, tokens_W: Floats) -> None:
        """Add a step, unless the number is not known on all workers."""
        if not (np.isfinite(tokens_W).all() and (tokens_W > 0).all()):
            return
        logs_W = np.log(tokens_W)
        logs_W = logs_W - np.median(logs_W)
        self._steps += 1
        self._tokens_W = self._tokens_W + tokens_W
        self._logs_W = self._logs_W + logs_W
        self._squares_W = self._squares_W + logs_W**2

    def words(self, ranks: Sequence[int]) -> str:
        """Return how many these workers count, in a clause, if clearly others than the rest."""
        if self._steps < _TOKEN_STEPS:
            return ""
        mean_W = self._logs_W / self._steps
        spread_W = np.sqrt(np.maximum(self._squares_W / self._steps - mean_W**2, 0.0) / self._steps)
        own = max(ranks, key=lambda rank: abs(mean_W[rank]), default=0)
        if abs(mean_W[own]) < max(_TOKENS_APART / 2, _STANDARD_ERRORS * spread_W[own]):
            return ""
        tokens_W = self._tokens_W / self._steps
        others = np.delete(tokens_W, own)
        rest = f"rank {1 - own}" if len(others) == 1 else "the median of the others"
        return (
            f"; rank {own} counts {tokens_W[own]:,.0f} label tokens a step, and {rest} "
            f"{np.median(others):,.0f}"
        )

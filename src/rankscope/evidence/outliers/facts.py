"""Facts beside a finding on workers that differ, no evidence of their own: zeros and label tokens.

Legend of shapes: W workers, G groups.
"""

from collections.abc import Sequence

import numpy as np

from rankscope.bus.words import count, listed, name_ranks, shortened
from rankscope.stats.arrays import Floats, Ints
from rankscope.stats.state import Stateful

_MOST_NAMED = 5

Zeros = dict[tuple[int, ...], list[str]]
"""Groups by the workers whose gradient is zero in them."""


class ZeroGroups(Stateful):
    """Counts, for each worker and group, the steps in which its gradient was exactly zero.

    No sampling explains that: another loss, or another part of the model, leads to these workers'
    gradients. It is no fault where one rank computes for several, or where a rank has a part of the
    model to itself.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self.steps = 0  # with the present groups
        self._zero_WG: Ints = np.zeros((0, 0), np.int64)
        self._other_WG: Ints = np.zeros((0, 0), np.int64)

    def observe(self, names: list[str], norms_WG: Floats) -> None:
        """Process the norms of a step; other groups start anew."""
        if names != self._names:
            self._names, self.steps = names, 0
            self._zero_WG = np.zeros(norms_WG.shape, np.int64)
            self._other_WG = np.zeros(norms_WG.shape, np.int64)
        self.steps += 1
        self._zero_WG += norms_WG == 0
        self._other_WG += norms_WG > 0

    def find(self) -> Zeros:
        """Return the groups in which some workers were always zero, and some never."""
        always_WG = self._zero_WG == self.steps
        never_WG = self._other_WG == self.steps
        found: Zeros = {}
        for group in np.flatnonzero(always_WG.any(axis=0) & never_WG.any(axis=0)):
            ranks = tuple(np.flatnonzero(always_WG[:, group]).tolist())
            found.setdefault(ranks, []).append(self._names[group])
        return found


def in_words(zeros: Zeros, steps: int) -> str:
    """Return a sentence: whose gradient is zero, and in which groups."""
    parts = [
        f"of {name_ranks(ranks)} in {shortened(groups, _MOST_NAMED)}"
        for ranks, groups in zeros.items()
    ]
    return (
        f" The gradient {listed(parts)} was exactly zero in all of {count(steps, 'step')}; other "
        "workers have one there."
    )


def what_to_check(zeros: Zeros) -> str:
    """Return what may keep a gradient from these workers."""
    ranks = {rank for each in zeros for rank in each}
    return (
        f"Look for what keeps {name_ranks(ranks)} from a gradient there: a branch on the rank, a "
        "module that only some ranks use, detach(), or a collective whose backward pass returns "
        "nothing to them. It may be meant, where one rank computes for several"
    )


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

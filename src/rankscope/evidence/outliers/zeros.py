"""Groups of parameters in which some workers' gradient is exactly zero, step after step.

No sampling explains that: another loss, or another part of the model, leads to these workers'
gradients. It is no fault where one rank computes for several, or where a rank has a part of the
model to itself.

Legend of shapes: W workers, G groups.
"""

import numpy as np

from rankscope.bus.words import count, listed, name_ranks, shortened
from rankscope.stats.arrays import Floats, Ints
from rankscope.stats.state import Stateful

_MOST_NAMED = 5

Zeros = dict[tuple[int, ...], list[str]]
"""Groups by the workers whose gradient is zero in them."""


class ZeroGroups(Stateful):
    """Counts, for each worker and group, the steps in which its gradient was exactly zero."""

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

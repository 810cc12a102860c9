"""Gross outliers: single values far beyond anything that the run has shown before.

No alarm within one step can be free of assumptions: an e-value of one step is at most W. So this is
a note, outside of the false-alarm budget, and a rare one: each must be twice as far out as the
last, on any worker.

Gross outliers that come again and again are another note, on the worker to which most of them
belong: were all alike, k or more of n would fall on one worker with a probability of at most
``W·P(Binomial(n, 1/W) >= k)``. Of four workers, eight on one are enough, long before the evidence
within the budget, which grows by a factor W a step at most, has reached its level.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rankscope.core.finding import Severity
from rankscope.core.state import Stateful
from rankscope.diagnose.evidence import Evidence
from rankscope.diagnose.rules import name_ranks

KEY = "gross-outlier"
KEY_AGAIN = "gross-outliers"
FROM = 30.0
"""Robust standard deviations from which a value can be a gross outlier."""

AGAIN_FROM = 10.0
"""The same for those that come again and again on one worker."""

CHANCE = 1e-4
"""What chance has to be less than to tell of these."""

_MOST_COUNTED = 64
_FIRST_SCALES = 3  # steps until the robust scale means something
_WARM_UP = 50
_FEWEST_WORKERS = 4
_STEPS_TOLD = 8


class GrossOutliers(Stateful):
    """Keeps the record of how far out a value has been, and tells when it is broken by far.

    Args:
        labels: Names of the signals in words ``[S]``.
        num_workers: W.
    """

    SETTINGS = ("_labels", "_num_workers")

    def __init__(self, labels: Sequence[str], num_workers: int) -> None:
        self._labels = tuple(labels)
        self._num_workers = num_workers
        self._record = FROM / 2
        self._steps = 0
        self._ranks: set[int] = set()
        self._seen: list[int] = []
        self._recent: list[tuple[int, int]] = []  # step and worker
        self._told = 0

    def observe(self, z_SW: NDArray[np.float32], step: int) -> list[Evidence]:
        """Take one step.

        Args:
            z_SW: Distances from the median, in robust standard deviations.
            step: Step number.
        """
        self._steps += 1
        if self._num_workers < _FEWEST_WORKERS:
            return []
        found = (self._see_largest(z_SW, step), self._see_again(z_SW, step))
        return [evidence for evidence in found if evidence is not None]

    def _see_largest(self, z_SW: NDArray[np.float32], step: int) -> Evidence | None:
        largest = float(z_SW.max())
        broken = largest >= 2 * self._record
        self._record = max(self._record, largest)
        if not broken or self._steps <= _WARM_UP:
            return None
        signal, worker = np.unravel_index(int(z_SW.argmax()), z_SW.shape)
        self._ranks.add(int(worker))
        self._seen.append(step)
        return self._evidence(int(signal), int(worker), largest)

    def _see_again(self, z_SW: NDArray[np.float32], step: int) -> Evidence | None:
        """Count whose values are far out; speaks when chance does not explain it, then rarely."""
        signal, worker = np.unravel_index(int(z_SW.argmax()), z_SW.shape)
        z = float(z_SW[signal, worker])
        if z < AGAIN_FROM or self._steps <= _FIRST_SCALES:
            return None
        self._recent = [*self._recent, (step, int(worker))][-_MOST_COUNTED:]
        own = [at for at, whose in self._recent if whose == worker]
        count, total = len(own), len(self._recent)
        chance = self._num_workers * _at_least(count, total, 1 / self._num_workers)
        if chance > CHANCE or count < 2 * self._told:
            return None
        self._told = count
        return Evidence(
            cause="inconclusive",
            severity=Severity.NOTE,
            ranks=(int(worker),),
            first_step=own[0],
            last_step=step,
            count=count,
            fields={
                "count": f"{count:,}",
                "total": f"{total:,}",
                "ranks": name_ranks([int(worker)]),
                "what": self._labels[int(signal)],
                "step": f"{step:,}",
                "z": f"{z:,.0f}",
                "chance": f"{chance:.0e}",
            },
            numbers={"steps": own[-_STEPS_TOLD:], "of_steps": total, "chance": chance},
            key=KEY_AGAIN,
        )

    def _evidence(self, signal: int, worker: int, z: float) -> Evidence:
        return Evidence(
            cause="inconclusive",
            severity=Severity.NOTE,
            ranks=tuple(sorted(self._ranks)),
            first_step=self._seen[0],
            last_step=self._seen[-1],
            count=len(self._seen),
            fields={
                "step": f"{self._seen[-1]:,}",
                "ranks": name_ranks([worker]),
                "what": self._labels[signal],
                "z": f"{z:,.0f}",
            },
            numbers={
                "steps": self._seen[-_STEPS_TOLD:],
                "robust_standard_deviations": z,
                "signal": self._labels[signal],
            },
            key=KEY,
        )


def _at_least(count: int, total: int, share: float) -> float:
    """Return the probability of ``count`` or more among ``total``."""
    return math.fsum(
        math.comb(total, k) * share**k * (1 - share) ** (total - k) for k in range(count, total + 1)
    )

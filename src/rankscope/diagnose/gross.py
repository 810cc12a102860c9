"""Gross outliers: single values far beyond anything that the run has shown before.

No alarm within one step can be free of assumptions: an e-value of one step is at most W. So this is
a note, outside of the false-alarm budget, and a rare one: each must be twice as far out as the
last, on any worker.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rankscope.core.finding import Severity
from rankscope.core.state import Stateful
from rankscope.diagnose.evidence import Evidence
from rankscope.diagnose.rules import name_ranks

KEY = "gross-outlier"
FROM = 30.0
"""Robust standard deviations from which a value can be a gross outlier."""

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

    def observe(self, z_SW: NDArray[np.float32], step: int) -> Evidence | None:
        """Take one step.

        Args:
            z_SW: Distances from the median, in robust standard deviations.
            step: Step number.
        """
        self._steps += 1
        largest = float(z_SW.max())
        broken = largest >= 2 * self._record and self._num_workers >= _FEWEST_WORKERS
        self._record = max(self._record, largest)
        if not broken or self._steps <= _WARM_UP:
            return None
        signal, worker = np.unravel_index(int(z_SW.argmax()), z_SW.shape)
        self._ranks.add(int(worker))
        self._seen.append(step)
        return self._evidence(int(signal), int(worker), largest)

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

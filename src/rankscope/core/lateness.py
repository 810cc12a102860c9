"""Which workers are slow, from the time for which each was busy before it began to wait.

Legend of shapes: S steps of a window, W workers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.core.arrays import Floats, Ints

Bools = NDArray[np.bool_]

_MARGIN = 0.10  # of the step's time, over the typical worker
_LEAST_SECONDS = 2e-3  # below, it is the operating system's
_MOST = 0.75  # of a window's steps


@dataclass(frozen=True, slots=True)
class Lateness:
    """What a window of steps says of the workers.

    Attributes:
        steps_S: Step numbers.
        seconds: Time of a step.
        behind_SW: Seconds by which a worker was ready later than the typical one; NaN if unknown.
        slow_W: Whether a worker was clearly slow.
        lingers_W: Whether one that was slow before still is.
    """

    steps_S: Ints
    seconds: float
    behind_SW: Floats
    slow_W: Bools
    lingers_W: Bools

    @property
    def margin(self) -> float:
        """Seconds behind from which on a worker is slow."""
        return max(_MARGIN * self.seconds, _LEAST_SECONDS)

    @classmethod
    def of(cls, steps_S: Ints, seconds_S: Floats, behind_SW: Floats) -> "Lateness":
        """Judge a window.

        Args:
            steps_S: Step numbers.
            seconds_S: Time of each step.
            behind_SW: Seconds by which each worker was ready later than the typical one; NaN if
                unknown, but known of a worker in each step at least.
        """
        seconds = float(np.median(seconds_S))
        margin = max(_MARGIN * seconds, _LEAST_SECONDS)
        slow_W = np.mean(behind_SW >= margin, axis=0) >= _MOST
        last_S = np.nanargmax(behind_SW, axis=1)
        if np.mean(slow_W[last_S]) <= 0.5:
            slow_W = np.zeros_like(slow_W)
        lingers_W = np.mean(behind_SW >= margin / 2, axis=0) >= 0.5
        return cls(steps_S.copy(), seconds, behind_SW.copy(), slow_W, lingers_W)


def typical_worker(seconds_W: Floats) -> float:
    """Return the lower median over the workers whose value is known, at least one of them."""
    known = seconds_W[np.isfinite(seconds_W)]
    middle = (len(known) - 1) // 2
    return float(np.partition(known, middle)[middle])


def find_onset(behind_S: Floats, level: float) -> int:
    """Return where a series changed from about 0 to about ``level`` for good.

    The most likely place if the noise is normal: where the sum of ``behind − level/2`` to the end
    is largest.
    """
    return len(behind_S) - 1 - int(np.argmax(np.cumsum((behind_S - level / 2)[::-1])))


def find_end(behind_S: Floats, level: float) -> int:
    """Return the number of steps after which a series fell from about ``level`` to about 0."""
    sums_S = np.cumsum(behind_S - level / 2)
    return int(np.argmax(sums_S)) + 1 if sums_S.max() > 0 else 0

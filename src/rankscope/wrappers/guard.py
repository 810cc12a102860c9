"""Keeps monitor failures out of the training: a guard around its work on the training thread."""

import time
from collections.abc import Callable
from typing import Any

from rankscope.gradients.device_clock import DeviceClock, DeviceOverhead
from rankscope.wrappers.surroundings import outside


class Guard:
    """Runs the monitor's work on the training thread: timed, and unable to raise into it.

    It runs outside of the training's contexts (:mod:`rankscope.wrappers.surroundings`).

    Args:
        failed: Called with the first exception; after it nothing runs any more.
        clock: Times it on an accelerator, too; None where the host does the work.
    """

    def __init__(
        self, failed: Callable[[Exception], None], clock: DeviceClock | None = None
    ) -> None:
        self.open = True
        self._clock = clock
        self._failed = failed
        self._seconds = 0.0
        self._depth = 0
        self._cut_short = False

    def __call__(self, work: Callable[..., None], *args: Any) -> None:
        """Run ``work`` with the arguments, unless the guard is shut."""
        if not self.open:
            return
        start = time.perf_counter()
        if self._clock is not None and self._depth == 0:
            self._clock.begin()
        self._depth += 1
        try:
            if self._depth == 1:
                outside(work, *args)
            else:
                work(*args)
        except Exception as error:
            self.open = False
            self._failed(error)
        except BaseException:  # Ctrl-C: the training's, wherever Python happens to raise it
            self._cut_short = True
            raise
        finally:
            self._depth -= 1
            if self._depth == 0:
                if self._clock is not None:
                    self._clock.end()
                self._seconds += time.perf_counter() - start

    def leave_out(self, seconds: float) -> None:
        """Do not count part of the time, from inside of work: it is accounted for elsewhere."""
        self._seconds -= seconds
        if seconds and self._clock is not None:
            self._clock.spoil()

    def take_cut_short(self) -> bool:
        """Return whether Ctrl-C or the like has ended work halfway since the last call."""
        cut_short, self._cut_short = self._cut_short, False
        return cut_short

    def take_seconds(self) -> float:
        """Return the time that work has taken since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def take_device_overhead(
        self, step: int, on_host: float, *, observed: bool
    ) -> DeviceOverhead | None:
        """Return a step's overhead on an accelerator, see :meth:`DeviceClock.take`."""
        return None if self._clock is None else self._clock.take(step, on_host, observed=observed)

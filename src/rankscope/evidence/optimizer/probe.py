"""Reads the optimizer at its first call, where it is saved, and at both ends of some windows."""

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rankscope.bus.probe import Job, MessagePart, Pending, Probe, StepEnd
from rankscope.bus.replicas import StateKind
from rankscope.evidence.optimizer import KEY
from rankscope.evidence.optimizer.holdings import PendingHoldings
from rankscope.evidence.optimizer.rounding import PendingRest, RestMeter, places_of
from rankscope.gradients.names import canonical_name

_PAUSE = 100  # times the host's time for a reading, until the next one: at most 1 % of the time


@dataclass(frozen=True, slots=True)
class PendingOptimizer:
    """Readings of the optimizer; their numbers may still be on the device."""

    readings: dict[StateKind, PendingHoldings | PendingRest]

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        return all(one.ready for one in self.readings.values())

    def read(self) -> MessagePart:
        """Wait for the device."""
        held = {str(kind): one.read() for kind, one in self.readings.items()}
        return MessagePart(names={KEY: held})


class OptimizerProbe(Probe):
    """Reads what the optimizer holds: before the session's first update, and where it is saved.

    Args:
        job: The training.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rest = RestMeter(job.wrapped.module, job.optimizer)
        self._readings: dict[StateKind, PendingHoldings | PendingRest] = {}
        self._caller: Any = None  # one of several optimizers, whose calls count
        self._num_calls = 0
        self._saved_at = -1
        self._next_time = 0.0

    def before_update(self) -> None:
        """Read what the optimizer holds before its first call."""
        if not self._num_calls and StateKind.STARTED not in self._readings:
            self._readings[StateKind.STARTED] = self._read()

    def after_update(self, optimizer: Any, *, complete: bool) -> None:
        """Count the call; of several optimizers, those of the first one."""
        self._caller = self._caller or optimizer
        if optimizer is not self._caller:
            return
        self._num_calls += 1
        rest = self._rest.see_update()
        if rest is not None:
            self._readings[StateKind.ROUNDED] = rest

    def see_saved(self) -> None:
        """Read what is saved, unless it was read since the last call."""
        now = time.monotonic()
        if self._num_calls in (0, self._saved_at) or now < self._next_time:
            return
        self._saved_at = self._num_calls
        self._readings[StateKind.SAVED] = self._read()
        self._next_time = now + _PAUSE * (time.monotonic() - now)

    def _read(self) -> PendingHoldings:
        places = places_of(self._job.wrapped.module)

        def name_of(parameter: Tensor) -> str:
            place = places.get(id(parameter))
            return "a parameter" if place is None else canonical_name(place.name)

        return PendingHoldings(self._job.optimizer, name_of)

    def collect(self, end: StepEnd) -> Pending | None:
        """Return the readings since the last step."""
        if not self._readings:
            return None
        readings, self._readings = self._readings, {}
        return PendingOptimizer(readings)


def make_probe(job: Job) -> OptimizerProbe | None:
    """Return the probe of an optimizer; None where nothing is compared."""
    return OptimizerProbe(job) if job.exact and job.optimizer is not None else None

"""Probes that measure in a few steps of a session, in growing distances."""

from typing import Any

from rankscope.bus.probe import Pending, Probe, StepEnd


class RareProbe(Probe):
    """Measures in the steps 0, 1, 2, 4, 8 and so on of a session.

    Attributes:
        due: Whether the present step is one of these.
        before: What was read before a pass that is still under way.
        pending: What was measured in it so far, to be sent at its end.

    Args:
        first_step: The session's first step.
        last: The last of these steps, counted from there; None for no end.
    """

    def __init__(self, first_step: int, last: int | None = None) -> None:
        self._first_step = first_step
        self._last_age = last
        self.due = False
        self.before: Any = None
        self.pending: Pending | None = None

    def begin_step(self, step: int, *, paused: bool) -> None:
        """Note whether the step is due."""
        age = step - self._first_step
        self.due = is_power(age) and (self._last_age is None or age <= self._last_age)

    def collect(self, end: StepEnd) -> Pending | None:
        """Return what was measured in this step."""
        pending, self.pending = self.pending, None
        return pending

    def abort(self) -> None:
        """Forget a step that was never finished."""
        self.before = self.pending = None


def is_power(age: int) -> bool:
    """Return whether a number is 0 or a power of two."""
    return age >= 0 and age & (age - 1) == 0

"""When canaries run that no finding led to."""

from typing import Protocol

SPACING = 200
"""Steps between two canaries of findings, or of a schedule within a share, at least."""

RETRY_AFTER = 64
"""Steps until a canary that some worker missed is tried again."""

SHARE = 0.002
"""Of the training's time: what canaries that nobody asked for may cost."""

_MOST_BACKING_OFF = 4  # of the wait, by factors of four


class Schedule(Protocol):
    """When canaries run that no finding led to."""

    by_default: bool

    def see(self, seconds: float) -> None:
        """Take the time of a step."""

    def due(self, step: int) -> bool:
        """Return whether one is to be decided now."""

    def ended(self, step: int, cost: float, *, failed: bool) -> None:
        """Take the end of one, and the seconds that it took."""


class EverySteps:
    """A schedule that the user gave.

    Args:
        every: Steps from one canary to the next.
    """

    by_default = False

    def __init__(self, every: int) -> None:
        self._every = every

    def see(self, seconds: float) -> None:
        """Take the time of a step."""

    def due(self, step: int) -> bool:
        """Return whether one is to be decided now."""
        return step % self._every == 0

    def ended(self, step: int, cost: float, *, failed: bool) -> None:
        """Take the end of one, and the seconds that it took."""


class WithinShare:
    """One canary at the beginning, and others as often as a share of the training's time allows.

    After a canary of c seconds the next is due when c/share seconds have passed. One that came to
    nothing is tried again later and later: what a model cannot do it will not do in the next step.

    Args:
        share: Of the training's time.
    """

    by_default = True

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._cost = self._since = 0.0
        self._not_before = self._failures = 0

    def see(self, seconds: float) -> None:
        """Take the time of a step."""
        self._since += seconds

    def due(self, step: int) -> bool:
        """Return whether one is to be decided now."""
        return step >= self._not_before and self._share * self._since >= self._cost

    def ended(self, step: int, cost: float, *, failed: bool) -> None:
        """Take the end of one, and the seconds that it took."""
        self._since, self._cost = 0.0, cost
        self._failures = self._failures + 1 if failed else 0
        backing_off = min(self._failures, _MOST_BACKING_OFF)
        self._not_before = step + (RETRY_AFTER << 2 * (backing_off - 1) if failed else SPACING)

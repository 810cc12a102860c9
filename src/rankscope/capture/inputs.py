"""What is measured of a model's inputs, besides which samples they are.

A new meter is a module like :mod:`rankscope.capture.lengths`, and a line here. Its values are
columns of the workers table (:mod:`rankscope.evidence`), and nothing else lists them.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Protocol

from rankscope.capture.lengths import LengthMeter


class PendingValues(Protocol):
    """Values of one step; those that come from a device may still be on their way."""

    @property
    def ready(self) -> bool:
        """Whether they can be read without waiting."""

    def read(self) -> Mapping[str, float]:
        """Wait for the device; return values by column, as far as they are known."""


class InputMeter(Protocol):
    """Looks at the inputs of forward passes in training, without waiting for a device."""

    def see(self, args: Sequence[Any], kwargs: Mapping[str, Any], forward: int = 0) -> None:
        """Take the inputs of a forward pass.

        Args:
            args: Positional inputs.
            kwargs: Named inputs.
            forward: Number of the forward pass.
        """

    def collect(self, idle: Container[int] = ()) -> PendingValues:
        """Return what was measured since the last call, and start again.

        Args:
            idle: Numbers of forward passes that do not count.
        """


INPUT_METERS: tuple[Callable[[], InputMeter], ...] = (LengthMeter,)

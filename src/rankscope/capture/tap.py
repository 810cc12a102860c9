"""The interface behind which every way of going data parallel hides."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LocalGradient:
    """One worker's gradient before the reduction, as far as it leaves the device.

    Attributes:
        sketch: float32 ``[k]`` on the gradient's device.
        squared_norm: float64 scalar tensor on the gradient's device.
    """

    sketch: Tensor
    squared_norm: Tensor


class GradientTap(Protocol):
    """Reads the local gradient during backward passes.

    A tap counts nothing and sends nothing: the scope tells it before each forward pass whether
    the next backward pass synchronises and whether to measure it.
    """

    def begin_forward(self, *, measure: bool) -> None:
        """Announce a forward pass in training whose backward pass will follow."""

    @property
    def complete(self) -> bool:
        """Whether a synchronising backward pass has run since the last :meth:`collect`."""

    def collect(self) -> LocalGradient | None:
        """Return what was measured, and start again; None when nothing valid was measured."""

    def remove(self) -> None:
        """Take all hooks out of the model."""

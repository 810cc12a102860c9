"""What a kernel does."""

from typing import Protocol

from torch import Tensor

from rankscope.capture.kernels.signs import ParameterSigns
from rankscope.capture.totals import GradientTotals


class Kernel(Protocol):
    """Measures flat parts of gradients on one device; its calls must follow one another there."""

    @property
    def name(self) -> str:
        """One of ``torch``, ``native`` and ``triton``."""

    def measure(
        self, flat: Tensor, signs: ParameterSigns, start: int, into: GradientTotals, group: int
    ) -> None:
        """Add a flat part of a gradient to one group's totals.

        Args:
            flat: ``[n]``, n > 0, contiguous, any floating dtype.
            signs: The parameter's signs.
            start: Position of the first element in the whole flat parameter.
            into: The totals to add to.
            group: Which row of them.
        """

    def measure_norm(self, flat: Tensor, into: GradientTotals, group: int) -> None:
        """Add the squared norm, largest magnitude and non-finite count alone."""

"""What a kernel does."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from rankscope.capture.kernels.prepared import Piece, Prepared
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

    def prepare(self, pieces: Sequence[Piece], *, sketching: bool) -> Prepared:
        """Prepare to measure several gradients at once, in a number of calls that is always small.

        Args:
            pieces: What the gradients consist of; at least one.
            sketching: Whether to sketch, or to measure norms alone.
        """

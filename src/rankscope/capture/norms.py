"""Measuring norms alone, for the tier without sketches."""

from torch import Tensor

from rankscope.capture.kernels.native import NativeKernel, NativePlace
from rankscope.capture.sketch import Sketcher
from rankscope.capture.totals import GradientTotals


class NormMeter(Sketcher):
    """A :class:`~rankscope.capture.sketch.Sketcher` that leaves all sketches zero."""

    sketches = False

    def measure(self, name: str, gradient: Tensor, into: GradientTotals, *, start: int = 0) -> None:
        """Add a gradient's squared norm, largest magnitude and non-finite count."""
        super().measure(name, gradient, into)  # wherever it begins

    def _measure_parts(self, name: str, gradient: Tensor, into: GradientTotals, start: int) -> None:
        self.measure_norm(name, gradient, into)

    def _new_place(
        self, native: NativeKernel, name: str, size: int, into: GradientTotals, start: int
    ) -> NativePlace:
        return native.norm_place(into, self._norm_row(name))

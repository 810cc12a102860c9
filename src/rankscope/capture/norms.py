"""Measuring norms alone, for the tier without sketches."""

from torch import Tensor

from rankscope.capture.sketch import Sketcher
from rankscope.capture.totals import GradientTotals


class NormMeter(Sketcher):
    """A :class:`~rankscope.capture.sketch.Sketcher` that leaves all sketches zero."""

    sketches = False

    def measure(self, name: str, gradient: Tensor, into: GradientTotals, *, start: int = 0) -> None:
        """Add a gradient's squared norm, largest magnitude and non-finite count."""
        self.measure_norm(name, gradient, into)

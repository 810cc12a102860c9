"""Measuring norms alone, for the tier without sketches."""

from rankscope.capture.sketch import Sketcher


class NormMeter(Sketcher):
    """A :class:`~rankscope.capture.sketch.Sketcher` that leaves all sketches zero."""

    sketches = False

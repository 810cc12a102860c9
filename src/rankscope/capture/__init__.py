"""What one worker can see of itself: local gradient, loss and samples; torch, no communication."""

from rankscope.capture.ddp import DDPTap
from rankscope.capture.host import HostCopy
from rankscope.capture.loss import LossMeter
from rankscope.capture.samples import SampleMeter
from rankscope.capture.sketch import GradientMeasure, Sketcher
from rankscope.capture.tap import GradientTap, LocalGradient

__all__ = [
    "DDPTap",
    "GradientMeasure",
    "GradientTap",
    "HostCopy",
    "LocalGradient",
    "LossMeter",
    "SampleMeter",
    "Sketcher",
]

"""What one worker can see of itself: local gradient, loss and samples; torch, no communication."""

from rankscope.capture.ddp import DDPTap
from rankscope.capture.handover import GradientHandover
from rankscope.capture.host import HostCopy
from rankscope.capture.loss import LossMeter
from rankscope.capture.norms import NormMeter
from rankscope.capture.optimizer import OptimizerMeter
from rankscope.capture.samples import SampleMeter
from rankscope.capture.sketch import Sketcher
from rankscope.capture.tap import GradientTap, LocalGradient, ReadReduced
from rankscope.capture.totals import GradientTotals

__all__ = [
    "DDPTap",
    "GradientHandover",
    "GradientTap",
    "GradientTotals",
    "HostCopy",
    "LocalGradient",
    "LossMeter",
    "NormMeter",
    "OptimizerMeter",
    "ReadReduced",
    "SampleMeter",
    "Sketcher",
]

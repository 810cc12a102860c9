"""What one worker can see of itself: local gradient, loss and samples; torch, no communication."""

from rankscope.capture.host import HostCopy
from rankscope.capture.loss import LossMeter
from rankscope.capture.optimizer import OptimizerMeter
from rankscope.capture.rollouts import RolloutMeter
from rankscope.capture.samples import SampleMeter
from rankscope.capture.sketch import NormMeter, Sketcher
from rankscope.capture.taps.ddp import DDPTap
from rankscope.capture.taps.tap import GradientTap, LocalGradient, ReadReduced
from rankscope.capture.totals import GradientTotals
from rankscope.capture.transfer import GradientTransfer

__all__ = [
    "DDPTap",
    "GradientTap",
    "GradientTotals",
    "GradientTransfer",
    "HostCopy",
    "LocalGradient",
    "LossMeter",
    "NormMeter",
    "OptimizerMeter",
    "ReadReduced",
    "RolloutMeter",
    "SampleMeter",
    "Sketcher",
]

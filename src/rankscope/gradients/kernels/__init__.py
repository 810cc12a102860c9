"""The kernels that read a gradient once, behind one interface.

All yield the same numbers within rounding: squared norm, sketch, largest magnitude and the count
of non-finite values. :func:`choose_kernel` picks the fastest one that works on a device.
"""

from rankscope.gradients.kernels.choose import choose_kernel
from rankscope.gradients.kernels.interface import PERIOD, Kernel, ParameterSigns, period_signs

__all__ = ["PERIOD", "Kernel", "ParameterSigns", "choose_kernel", "period_signs"]

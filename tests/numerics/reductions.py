"""A whole reduction in one call, and sums without any error."""

import math

import numpy as np

from rankscope.lab.numerics.summation import Arithmetic, Scheme, reduce_buffers, to_buffers


def reduce_mean(values_WN, scheme=Scheme.SEQUENTIAL, arithmetic=None, order=None):
    """Return the mean ``[N]`` of gradients ``[W, N]`` as a reduction computes it."""
    arithmetic = arithmetic or Arithmetic()
    return reduce_buffers(to_buffers(values_WN, arithmetic), scheme, arithmetic, order)


def exact_sums(values_WN):
    """Return the correctly rounded sums over workers ``[N]``."""
    return np.array([math.fsum(column) for column in values_WN.T.astype(np.float64).tolist()])

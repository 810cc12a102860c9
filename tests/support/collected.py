"""What capture has collected in a step, on the host."""

import numpy as np

from rankscope.gradients.host import HostCopy


def to_arrays(collected):
    """Return losses and weights in float64, one array ``[U]`` per micro-batch; unknown are NaN."""
    values = [micro.values.numpy().astype(np.float64, copy=False) for micro in collected]
    weights = [
        np.full(len(value), np.nan)
        if micro.weights is None
        else micro.weights.numpy().astype(np.float64, copy=False)
        for micro, value in zip(collected, values, strict=True)
    ]
    return values, weights


def to_array(collected):
    arrays = [part.numpy() if isinstance(part, HostCopy) else part for part in collected]
    return np.concatenate([np.empty(0, np.int64), *arrays]).astype(np.int64, copy=False)

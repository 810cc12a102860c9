"""The result of the reduction, in columns of a step."""

import math

import numpy as np

from rankscope.bus.messages import Derived
from rankscope.bus.step import GatheredStep, reduced_norm


def derive(gathered: GatheredStep) -> Derived:
    """Return the norm of the reduced gradient, and its distance from the workers' mean."""
    residuals_W = gathered.total_residuals_W
    known_W = np.empty(0) if residuals_W is None else residuals_W[np.isfinite(residuals_W)]
    return Derived(
        {
            "grad_norm_reduced": reduced_norm(gathered),
            "reduction_residual": float(known_W.max()) if known_W.size else math.nan,
        }
    )

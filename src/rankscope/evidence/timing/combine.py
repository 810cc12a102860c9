"""The time that the monitor takes from a step."""

import math

import numpy as np

from rankscope.bus.messages import Derived
from rankscope.bus.step import GatheredStep


def derive(gathered: GatheredStep) -> Derived:
    """Return the slowest worker's overhead."""
    seconds_W = gathered.workers["overhead_seconds"]
    known_W = seconds_W[np.isfinite(seconds_W)]
    return Derived({"overhead_seconds": float(known_W.max()) if known_W.size else math.nan})

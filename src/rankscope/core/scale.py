"""Undoing what the loss was multiplied by before backward."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.core.arrays import Floats
from rankscope.core.step import GatheredStep

_NORMS = ("grad_norm", "grad_max", "reduced_norm")


def undo_common_scale(gathered: GatheredStep) -> GatheredStep:
    """Divide all gradients of a step by the factor that most workers put on their loss.

    Gradient scalers multiply the loss by thousands, accumulation divides it. The factor is the
    median over workers of ``grad_scale``, one for all: a single worker whose loss is scaled
    otherwise still stands out by its gradient. Without a known factor nothing changes.

    Args:
        gathered: Gradients as the hooks saw them.

    Returns:
        The same step with gradients of the unscaled loss, averaged over micro-batches.
    """
    scale = common_scale(gathered)
    if math.isnan(scale):
        return gathered
    if scale == 1 and all(len(norms) == 1 for norms in gathered.micro_norms):
        return gathered
    norms = {name: gathered.workers[name] / scale for name in _NORMS if name in gathered.workers}
    return replace(
        gathered,
        workers={**gathered.workers, **norms},
        micro_norms=tuple(norms * len(norms) / scale for norms in gathered.micro_norms),
        sketches_WK=_divided(gathered.sketches_WK, scale),
        group_norms_WG=_divided(gathered.group_norms_WG, scale),
        group_sketches_WGK=_divided(gathered.group_sketches_WGK, scale),
        gram_WW=_divided(gathered.gram_WW, scale**2),
        reduced_products_W=_divided(gathered.reduced_products_W, scale**2),
    )


def common_scale(gathered: GatheredStep) -> float:
    """Return the factor that most workers put on their loss; NaN when it is not known."""
    scales_W = np.abs(gathered.workers["grad_scale"])
    first = float(scales_W[0])
    if 0 < first < math.inf and np.count_nonzero(scales_W == first) == len(scales_W):
        return first
    known = scales_W[np.isfinite(scales_W) & (scales_W > 0)]
    return _median(known) if known.size else math.nan


def _median(values: Floats) -> float:
    ordered = np.sort(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return float(ordered[middle])
    return (float(ordered[middle - 1]) + float(ordered[middle])) / 2


def _divided(values: NDArray[Any] | None, scale: float) -> NDArray[Any] | None:
    if values is None or scale == 1:
        return values
    return (values / scale).astype(values.dtype, copy=False)

"""The audit of a reduction: what came out of it, against the mean of what went in.

Sketches are linear: the sketch of the workers' mean gradient is the mean of their sketches. So the
norm of ``mean_i S(g_i) - S(r)`` tells how far the reduced gradient r is from that mean, element by
element. It is taken for each section of the gradient (:mod:`rankscope.core.sections`), and needs
one sum over workers, whose size does not grow with their number.

Where each worker holds the whole reduced gradient, it subtracts its own after the sum and so learns
what its own result is worth. Where it is sharded, each subtracts its shard before the sum, and all
learn the same.

Legend of shapes: W workers, G groups, S sections, k numbers in a section's sketch.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.core.arrays import Floats, Floats32, Ints

_TINY = float(np.finfo(np.float32).tiny)

AUDIT_WIDTH = 1021
"""Numbers in a section's sketch, a prime: a residual errs by about 2.5 % (RMS) of itself."""


@dataclass(frozen=True, slots=True)
class AuditPart:
    """What one worker knows of one step's reduction.

    Attributes:
        local_SK: Sketches of the sections of its local gradient ``[S, k]``.
        reduced_SK: Those of what it holds of the reduced gradient; NaN where that was not read.
        reduced_squares_S: Squared norms of the sections of what it holds ``[S]``; NaN likewise.
    """

    local_SK: Floats32
    reduced_SK: Floats32
    reduced_squares_S: Floats

    @classmethod
    def unknown(cls, num_sections: int, width: int) -> "AuditPart":
        """Return what a worker knows that has measured nothing."""
        nothing = np.full((num_sections, width), np.nan, np.float32)
        return cls(nothing, nothing, np.full(num_sections, np.nan))


def contribution(part: AuditPart, num_workers: int, copies: int) -> Floats32:
    """Return what a worker adds to the sum over workers.

    Args:
        part: What it knows.
        num_workers: W.
        copies: How many workers hold each element of the reduced gradient; W: each has it all.

    Returns:
        ``[S k]`` and, where the reduced gradient is sharded, its squared norms ``[S]``. float32:
        rounded once here and again in each partial sum, to about 5e-8 of the mean's norm.
    """
    share_SK = part.local_SK.astype(np.float64) / num_workers
    if copies >= num_workers:
        return share_SK.astype(np.float32).ravel()
    share_SK -= part.reduced_SK.astype(np.float64) / copies
    squares_S = part.reduced_squares_S / copies
    with np.errstate(over="ignore"):
        return np.concatenate([share_SK.ravel(), squares_S]).astype(np.float32)


def residuals(
    total_N: NDArray[np.floating],
    part: AuditPart,
    firsts_G: Ints,
    num_workers: int,
    copies: int,
) -> Floats:
    """Return how far the reduced gradient is from the mean of the workers' gradients.

    Args:
        total_N: Sum over workers of what :func:`contribution` returned.
        part: As this worker gave it there.
        firsts_G: The first section of each group, by index.
        num_workers: As given there.
        copies: As given there.

    Returns:
        ``[1 + G]``: the distance relative to the norm of the reduced gradient that this worker
        holds (of the whole one where it is sharded): of all sections together, then for each group
        the largest among its sections. NaN where a worker's gradient is not known or not finite,
        and where it is sharded and its squared norm too small for the sum's float32.
    """
    shape = part.local_SK.shape
    total = np.asarray(total_N, np.float64)
    difference_SK, squares_S = (
        total[: shape[0] * shape[1]].reshape(shape),
        total[shape[0] * shape[1] :],
    )
    if copies >= num_workers:
        difference_SK = difference_SK - part.reduced_SK
        squares_S = part.reduced_squares_S
        least = 0.0
    else:
        least = num_workers * _TINY  # the workers' squares may be lost in the sum below this
    with np.errstate(invalid="ignore", over="ignore"):
        distances_S = np.square(difference_SK).sum(axis=1)
        each_S = _relative(distances_S, squares_S, least)
        whole = _relative(distances_S.sum(keepdims=True), squares_S.sum(keepdims=True), least)
        return np.concatenate([whole, np.maximum.reduceat(each_S, firsts_G)])


def _relative(distances: Floats, squares: Floats, least: float) -> Floats:
    """Return roots of ratios; 0 of nothing and nothing, 1 where something became nothing.

    Squares below ``least`` are not exact: NaN where the distance is as small and not zero.
    """
    lost = (squares < least) & (distances > 0) & (distances < least)
    known = np.isfinite(distances) & np.isfinite(squares) & ~lost
    below = np.where(squares > 0, squares, np.where(distances > 0, distances, 1.0))
    ratio: Floats = np.sqrt(np.where(known, distances, 0.0) / np.where(known, below, 1.0))
    return np.where(known, ratio, np.nan)

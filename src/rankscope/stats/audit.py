"""The audit of a reduction: its result, against the mean of the local gradients.

Sketches are linear: the sketch of the workers' mean gradient is the mean of their sketches. So the
norm of ``mean_i S(g_i) - S(r)`` estimates the distance of the reduced gradient r from that mean. It
is computed for each section of the gradient (:mod:`rankscope.bus.groups`), and needs one sum over
workers, whose size does not grow with their number. Beyond 64 workers each host sends the sum over
its own, of the whole gradient and of a few sections in turn.

Where each worker holds the whole reduced gradient, it subtracts its own after the sum and so gets
the error of its own result. Where it is sharded, each subtracts its shard before the sum, and all
get the same.

Legend of shapes: W workers, G groups, S sections, k numbers in a section's sketch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.arrays import Floats, Floats32, Ints
from rankscope.stats.direction import fold

_TINY = float(np.finfo(np.float32).tiny)

AUDIT_WIDTH = 251
"""Numbers in a section's sketch, a prime: a residual errs by 4.5 % of itself (RMS)."""


@dataclass(frozen=True, slots=True)
class AuditPart:
    """One worker's part of the audit of a step."""

    local_SK: Floats32  # sketches of the sections of its local gradient ``[S, k]``
    reduced_SK: Floats32  # those of its part of the reduced gradient; NaN where that was not read
    reduced_squares_S: Floats  # squared norms of the sections of that part ``[S]``; NaN likewise

    def narrowed(self, sections: Ints, width: int) -> "AuditPart":
        """Return the part for the root where all sections are too much to move.

        Its rows ``[1 + s]`` are the whole gradient, and the sections of this step by index ``[s]``,
        with at most ``width`` numbers each.
        """
        whole_and = [np.arange(len(self.local_SK)), *sections[:, None]]

        def rows(given_SK: Floats32) -> Floats32:
            each = [given_SK[chosen].sum(axis=0, dtype=np.float64) for chosen in whole_and]
            return fold(np.stack(each).astype(np.float32), width)

        squares = [self.reduced_squares_S[chosen].sum() for chosen in whole_and]
        return AuditPart(rows(self.local_SK), rows(self.reduced_SK), np.array(squares))


def total_of(parts: Sequence[AuditPart], num_workers: int, copies: int) -> Floats:
    """Return some workers' contribution to the sum over all of them.

    It is ``[S k]`` and, where the reduced gradient is sharded, its squared norms ``[S]``. Between
    hosts float32 is enough: it rounds to about 5e-8 of the mean's norm. ``copies`` workers hold
    each element of the reduced gradient; all ``num_workers`` where each has all of it.

    Example:
        >>> ones = np.ones((1, 2), np.float32)
        >>> parts = [AuditPart(x * ones, 2 * ones, np.array([8.0])) for x in (1.0, 3.0)]
        >>> total_of(parts, num_workers=2, copies=2).tolist()  # the mean of what went in
        [2.0, 2.0]
    """
    local_SK = sum((part.local_SK.astype(np.float64) for part in parts), start=np.zeros(()))
    shares_SK: Floats = local_SK / num_workers
    if copies >= num_workers:
        return shares_SK.ravel()
    reduced_SK = sum((part.reduced_SK.astype(np.float64) for part in parts), start=np.zeros(()))
    squares_S = sum((part.reduced_squares_S for part in parts), start=np.zeros(()))
    return np.concatenate([(shares_SK - reduced_SK / copies).ravel(), squares_S / copies])


def residuals(
    total_N: NDArray[np.floating],
    part: AuditPart,
    firsts_G: Ints,
    num_workers: int,
    copies: int,
) -> Floats:
    """Return the distance of the reduced gradient from the mean of the workers' gradients.

    ``total_N`` is the sum over workers of :func:`total_of`, ``part`` that of the worker in
    question, ``firsts_G`` the first section of each group.

    The result ``[1 + G]`` is relative to the norm of the reduced gradient that this worker holds
    (of the whole one where it is sharded): of all sections together, then for each group the
    largest among its sections. NaN where a worker's gradient is not known or not finite, and where
    it is sharded and its squared norm too small for a sum in float32.
    """
    distances_S, squares_S, least = _distances(total_N, part, num_workers, copies)
    each_S = _relative(distances_S, squares_S, least)
    with np.errstate(invalid="ignore", over="ignore"):
        whole = _relative(distances_S.sum(keepdims=True), squares_S.sum(keepdims=True), least)
    return np.concatenate([whole, np.maximum.reduceat(each_S, firsts_G)])


def residuals_of_all(parts_W: Sequence[AuditPart], firsts_G: Ints, copies: int) -> Floats:
    """Return :func:`residuals` of all workers ``[W, 1 + G]`` from all of their parts.

    Example:
        >>> ones, first_G = np.ones((1, 2), np.float32), np.array([0])
        >>> right = [AuditPart(x * ones, 2 * ones, np.array([8.0])) for x in (1.0, 3.0)]
        >>> residuals_of_all(right, first_G, copies=2).tolist()  # whole, and its only group
        [[0.0, 0.0], [0.0, 0.0]]
        >>> wrong = [AuditPart(x * ones, 4 * ones, np.array([32.0])) for x in (1.0, 3.0)]
        >>> residuals_of_all(wrong, first_G, copies=2).tolist()  # summed, not averaged
        [[0.5, 0.5], [0.5, 0.5]]
    """
    num_workers = len(parts_W)
    total_N = total_of(parts_W, num_workers, copies)
    kept = parts_W[:1]
    which_W = np.zeros(num_workers, np.int64)  # sharded: all get the same
    if copies >= num_workers:
        kept, which_W = distinct(parts_W)
    found = [residuals(total_N, part, firsts_G, num_workers, copies) for part in kept]
    return np.stack(found)[which_W]


def residuals_by_row(
    total_N: NDArray[np.floating], part: AuditPart, num_workers: int, copies: int
) -> Floats:
    """Return the same for each row of a part ``[S]``, narrowed or not, or of N parts ``[N, S]``."""
    return _relative(*_distances(total_N, part, num_workers, copies))


def distinct(parts: Sequence[AuditPart]) -> tuple[Sequence[AuditPart], Ints]:
    """Return the parts with different reduced gradients, and which each worker has ``[W]``.

    In a healthy job whose workers each hold the whole reduced gradient there is one.
    """
    found: dict[bytes, int] = {}
    kept: list[AuditPart] = []
    which: list[int] = []
    for part in parts:
        place = found.setdefault(part.reduced_SK.tobytes(), len(kept))
        if place == len(kept):
            kept.append(part)
        which.append(place)
    return kept, np.array(which, np.int64)


def _distances(
    total_N: NDArray[np.floating], part: AuditPart, num_workers: int, copies: int
) -> tuple[Floats, Floats, float]:
    """Return squared distances ``[S]``, squared norms ``[S]``, and their resolution."""
    shape = part.reduced_SK.shape[-2:]
    total = np.asarray(total_N, np.float64)
    size = shape[0] * shape[1]
    difference_SK = total[:size].reshape(shape)
    squares_S = total[size:]
    least = num_workers * _TINY  # the workers' squares may be lost in the sum below this
    if copies >= num_workers:
        difference_SK = difference_SK - part.reduced_SK
        squares_S = part.reduced_squares_S
        least = 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        return np.square(difference_SK).sum(axis=-1), squares_S, least


def _relative(distances: Floats, squares: Floats, least: float) -> Floats:
    """Return roots of ratios; 0 for 0/0, 1 for x/0, NaN where squares are too small to be exact."""
    lost = (squares < least) & (distances > 0) & (distances < least)
    known = np.isfinite(distances) & np.isfinite(squares) & ~lost
    below = np.where(squares > 0, squares, np.where(distances > 0, distances, 1.0))
    ratio: Floats = np.sqrt(np.where(known, distances, 0.0) / np.where(known, below, 1.0))
    return np.where(known, ratio, np.nan)

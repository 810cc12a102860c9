"""Directions of many workers without any pair: each worker against the sum of all others.

Up to 64 workers everybody gets everybody's sketch and compares all pairs. Beyond, what a worker
must move may not grow with W. One all-reduce gives every worker the sum of all sketches; by itself
it then computes three numbers about its own gradient, which rank 0 collects.

Legend of shapes: W workers, K numbers in a sketch, g groups whose turn it is, k numbers in the
sketch of a group, N = 2K + gk + 2 + g numbers in a contribution, R = 3 + g numbers in a report.

With s_i the sketch of worker i, u_i = s_i/|s_i|, S = Σ s_j and U = Σ u_j:

- leave-one-out direction of worker i: cos(s_i, S − s_i), the same number as ``leave_one_out`` of
  ``core.direction`` finds in all pairs. S − s_i is taken element by element, so that it is exact
  up to the rounding of S itself: 2⁻²⁴ of the largest worker. (A worker 10⁶ times as large as the
  rest hides them from itself to about 5 %; nobody else is affected.)
- mean cosine over pairs: (|U|² − n)/(n(n − 1)) over the n workers with a direction. That is the
  mean of the sketches' cosines; as an estimate for the gradients its RMS error is about
  √(2/K)·(c + 1/n)·(1 − c), where c is the mean itself: 4·10⁻⁵ for 1,024 unrelated gradients.
- mean cosine weighted by norms: Σ_i s_i·(S − s_i) / Σ_{i≠j} |s_i||s_j|, from the reports.

A worker whose sketch is not finite, or so large that sums could overflow, contributes zeros: it
has no direction, and everybody else's numbers are those of a job without it.

What a step costs at W = 1,024, sent plus received, with an all-reduce that moves
4(1 − 1/W) times its size: K = 1,021, g = 4 of 40 groups in turn, k = 251 give N = 3,052 floats,
12,208 bytes, so 48,784 bytes moved; 10 integers in a second all-reduce add 320, and a message of
1,450 bytes to rank 0 makes 50,554. With 320 bytes of headers for each of the 20 + 20 messages it
is 63,354: below 64 KB, and for 10,240 workers nearly the same. Rank 0 receives the messages of all
others besides: (W − 1) times 1,450 bytes here.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.core.arrays import Floats, Floats32, Ints

SKETCH_WIDTH = 1021
"""Width of the sketch that is summed over workers; a prime, as that of the wide sketch."""

GROUPS_PER_STEP = 4
"""How many groups have their turn in one step."""

_LARGEST_NORM = 2.0**96
"""Sums of 2³¹ such sketches stay finite in float32."""

_LOST = 2.0**-22
"""A sum this much smaller than the norms of its terms is mostly rounding."""

_ONE_BY_DIRECTION = 1e-9
_ONE_BY_LENGTH = 2.0**-20


@dataclass(frozen=True, slots=True)
class Consensus:
    """What a worker knows about one step after the all-reduce.

    Attributes:
        num_directions: Workers whose gradient has a direction; the same on every worker.
        cosine_mean: Mean cosine over their pairs; the same on every worker. NaN below two.
        norm: Norm of this worker's sketch; NaN without a direction.
        rest_norm: Norm of the sum of all others' sketches.
        cosine_rest: Cosine between this worker and that sum; NaN where one has no direction.
        group_cosine_rest_g: The same for each group whose turn it is.
    """

    num_directions: int
    cosine_mean: float
    norm: float
    rest_norm: float
    cosine_rest: float
    group_cosine_rest_g: Floats

    def report(self) -> Floats32:
        """Return what rank 0 wants of this worker, ``[R]``; columns as in :func:`step_values`."""
        return np.array(
            [self.norm, self.rest_norm, self.cosine_rest, *self.group_cosine_rest_g], np.float32
        )


def groups_in_turn(turn: int, num_groups: int, per_step: int = GROUPS_PER_STEP) -> Ints:
    """Return the groups whose turn it is, by index ``[min(per_step, num_groups)]``.

    Args:
        turn: Number of the observed step: the step's number divided by the sampling interval. The
            step's own number would leave out some groups for ever.
        num_groups: How many groups there are.
        per_step: How many have their turn together.

    Example:
        >>> [groups_in_turn(turn, 5, 2).tolist() for turn in range(3)]
        [[0, 1], [2, 3], [4, 0]]
    """
    count = min(per_step, num_groups)
    return (turn * count + np.arange(count)) % max(num_groups, 1)


def contribution(sketch_K: Floats32, group_sketches_gK: Floats32) -> Floats32:
    """Return what a worker adds to the sum over workers.

    Args:
        sketch_K: Sketch of the local gradient ``[K]``; zeros when there is none.
        group_sketches_gK: Sketches of the groups whose turn it is ``[g, k]``.

    Returns:
        ``[N]``: sketch, sketch of length 1, groups' sketches, 1 for a direction, norm, groups'
        norms; zeros in place of what has no direction.
    """
    raw_K, norm = _with_direction(sketch_K)
    unit_K = raw_K / norm if norm else raw_K
    groups = [_with_direction(row) for row in group_sketches_gK]
    counts = np.array([float(norm > 0), norm, *(group_norm for _, group_norm in groups)])
    parts = [raw_K, unit_K, *(row for row, _ in groups), counts]
    return np.concatenate(parts).astype(np.float32)


def consensus_of(
    total_N: NDArray[np.floating], sketch_K: Floats32, group_sketches_gK: Floats32
) -> Consensus:
    """Compare this worker with all others.

    Args:
        total_N: Sum over workers of what :func:`contribution` returned.
        sketch_K: As this worker gave it there.
        group_sketches_gK: As this worker gave it there.

    Raises:
        ValueError: ``total_N`` is the sum of contributions of another size.
    """
    size, (num_groups, width) = len(sketch_K), group_sketches_gK.shape
    lengths = [size, size, num_groups * width, 2 + num_groups]
    if len(total_N) != sum(lengths):
        raise ValueError(
            f"expected a total of {sum(lengths)} numbers for sketches of {size} and "
            f"{num_groups} × {width}, got {len(total_N)}"
        )
    raw_K, unit_K, groups, counts = np.split(
        np.asarray(total_N, np.float64), np.cumsum(lengths)[:-1]
    )
    norm, rest_norm, cosine_rest = _against_rest(sketch_K, raw_K, counts[1])
    rows = zip(group_sketches_gK, groups.reshape(num_groups, width), counts[2:], strict=True)
    return Consensus(
        num_directions=round(counts[0]),
        cosine_mean=_mean_cosine(unit_K, round(counts[0])),
        norm=norm,
        rest_norm=rest_norm,
        cosine_rest=cosine_rest,
        group_cosine_rest_g=np.array([_against_rest(*row)[2] for row in rows], np.float64),
    )


def step_values(consensus: Consensus, reports_WR: Floats32) -> dict[str, float]:
    """Return the directions' columns of the steps table, for rank 0.

    Args:
        consensus: Rank 0's own.
        reports_WR: All workers' reports: norm of the sketch, norm of the others' sum, cosine of
            the two (the column ``cosine_rest``), and that cosine for each group in turn.

    Returns:
        ``cosine_mean``, ``cosine_weighted``, ``directions_undefined``, and ``cosine_min``, which
        takes pairs and so is NaN here.
    """
    norms_W, rest_norms_W, cosines_W = np.asarray(reports_WR[:, :3], np.float64).T
    products = np.nansum(norms_W) - norms_W
    above = float(np.nansum(norms_W * rest_norms_W * cosines_W))
    below = float(np.nansum(norms_W * products))
    return {
        "cosine_mean": consensus.cosine_mean,
        "cosine_weighted": _snapped(above / below, _ONE_BY_LENGTH) if below > 0 else float("nan"),
        "cosine_min": float("nan"),
        "directions_undefined": float(len(reports_WR) - consensus.num_directions),
    }


def _with_direction(sketch_K: Floats32) -> tuple[Floats, float]:
    """Return a sketch and its norm, or zeros for one without a direction."""
    sketch = np.asarray(sketch_K, np.float64)
    norm = float(np.sqrt(sketch @ sketch))
    if norm <= _LARGEST_NORM:  # not so for NaN either
        return sketch, norm
    return np.zeros(len(sketch)), 0.0


def _against_rest(
    sketch_K: Floats32, total_K: Floats, sum_of_norms: float
) -> tuple[float, float, float]:
    """Return the norms of a sketch and of the others' sum, and the cosine between them."""
    own_K, norm = _with_direction(sketch_K)
    if norm == 0:
        return (float("nan"),) * 3
    rest_K = total_K - own_K
    rest_norm = float(np.sqrt(rest_K @ rest_K))
    if not rest_norm > _LOST * sum_of_norms:
        return norm, 0.0, float("nan")
    return norm, rest_norm, _snapped(float(own_K @ rest_K) / norm / rest_norm, _ONE_BY_DIRECTION)


def _mean_cosine(unit_K: Floats, num_directions: int) -> float:
    if num_directions < 2:
        return float("nan")
    pairs = num_directions * (num_directions - 1)
    return _snapped((float(unit_K @ unit_K) - num_directions) / pairs, _ONE_BY_LENGTH)


def _snapped(cosine: float, rounding: float) -> float:
    """Bring a cosine within rounding of ±1 to ±1."""
    return float(np.sign(cosine)) if abs(cosine) >= 1.0 - rounding else cosine

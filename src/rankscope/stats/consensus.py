"""Directions of many workers without any pair: each worker against the sum of all others.

Up to 64 workers the root gets all sketches as they were measured, and compares all pairs. Beyond,
that would be too much to move. Then the agent of each host narrows the sketches of its workers, to
fewer numbers of half precision, and sends a few groups in turn; the root sums all workers' narrow
sketches and compares each worker with the rest of the sum.

Legend of shapes: W workers, K numbers in a narrow sketch, g groups whose turn it is, k numbers in
the narrow sketch of a group, N rows.

With s_i the narrow sketch of worker i, u_i = s_i/|s_i|, S = Σ s_j and U = Σ u_j, sums over the n
workers with a direction:

- leave-one-out direction of worker i: cos(s_i, S − s_i), the result of
  :func:`rankscope.stats.direction.leave_one_out` for all pairs of the same sketches;
- mean cosine over pairs: (|U|² − n)/(n(n − 1));
- mean cosine weighted by norms: (|S|² − Σ|s_i|²) / Σ_{i≠j} |s_i||s_j|.

The error of narrowing: a worker's cosine c errs by about (1 − c²)/√K (RMS): 0.031, 0.044 or 0.063
for the widths of :func:`narrowing_for`, where the wide sketch has 0.016. The errors of workers and
of steps are independent. The mean cosine errs by √(2/K)·(c + 1/n)·(1 − c):
6·10⁻⁵ for 1,024 unrelated gradients. Half precision adds 3·10⁻⁴ of a sketch's length, at right
angles: 10⁻⁷ of a cosine near 1, less than 10⁻⁵ elsewhere, and nothing between equal sketches.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.arrays import Floats, Floats32, Ints, mix
from rankscope.stats.direction import ROUNDING, snapped

_LOST = 2.0**-11
"""A sum this much smaller than its terms is mostly their rounding to half precision."""

_DROWNED = 1e-6
"""Squares of a rest that is this much smaller than the worker beside it are computed anew."""

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 times the golden ratio's fraction

_TOP = 15  # the largest number of a row is brought below 2^15: half precision ends at 65,504


class Narrowing(NamedTuple):
    """The size of narrow sketches, for each worker and step."""

    sketch_width: int  # numbers in the sketch of the gradient, a prime
    group_width: int  # numbers in the sketch of a group, a prime
    num_groups: int  # groups that have their turn in one step
    num_sections: int  # sections of the audit that have their turn in one step
    # numbers in the sketch of a section, a prime; their residuals err by 1/√(2 audit_width) of
    # themselves (RMS)
    audit_width: int


def narrowing_for(num_workers: int) -> Narrowing:
    """Return the sizes for so many workers: at 1,024 the root receives less than 4 MB a step.

    Example:
        >>> narrowing_for(1024)[:3]
        (509, 127, 4)
    """
    if num_workers <= 512:
        return Narrowing(1021, 251, 4, 4, 251)
    if num_workers <= 2048:
        return Narrowing(509, 127, 4, 2, 251)
    return Narrowing(251, 61, 4, 1, 127)


class Halves(NamedTuple):
    """Rows of half precision, each with a power of two of its own."""

    # NaN in a row that was not finite. Any number of axes before K.
    numbers_NK: NDArray[np.float16]
    exponents_N: NDArray[np.int16]

    def widened(self) -> Floats:
        """Return the rows in float64."""
        rows = self.numbers_NK.astype(np.float64)
        rows *= np.ldexp(1.0, self.exponents_N)[..., None]
        return rows


@dataclass(frozen=True, slots=True)
class Consensus:
    """Directions of the workers' gradients in a step, each against the rest."""

    num_directions: int  # workers whose gradient has a direction
    cosine_mean: float  # mean cosine over their pairs. NaN below two.
    cosine_weighted: float  # the same, weighted by the product of norms
    # cosine between each worker and the sum of all others; NaN where one has no direction
    cosine_rest_W: Floats
    group_cosine_rest_Wg: Floats  # the same for each group whose turn it is


def in_turn(step: int, count: int, per_step: int) -> Ints:
    """Return whose turn it is among ``count`` in a step, by index ``[min(per_step, count)]``.

    Multiples of the golden ratio spread evenly whatever the interval between observed steps, so
    that no host has to know it.

    Args:
        step: Step number.
        count: How many there are.
        per_step: How many have their turn together.

    Example:
        >>> [in_turn(step, 40, 4).tolist() for step in (0, 10, 20)]
        [[0, 1, 2, 3], [7, 8, 9, 10], [14, 15, 16, 17]]
    """
    first = (step * _GOLDEN % 2**64) * count >> 64
    return (first + np.arange(min(per_step, count))) % max(count, 1)


def fold(rows_NK: Floats32, width: int) -> Floats32:
    """Make narrower sketches: entry c, with a random sign, is added to entry c mod ``width``.

    Args:
        rows_NK: Sketches ``[N, K]``.
        width: Width of the result.

    Returns:
        ``[N, width]``, linear in the rows; the rows themselves where they are not wider.

    Example:
        >>> one, other = np.eye(7, dtype=np.float32)[:2, None] * 3
        >>> fold(one, 2).shape, bool((fold(one, 2) + fold(other, 2) == fold(one + other, 2)).all())
        ((1, 2), True)
    """
    num_rows, wide = rows_NK.shape
    if wide <= width:
        return rows_NK
    padded = np.zeros((num_rows, wide + -wide % width), np.float32)
    np.multiply(rows_NK, _signs(wide), out=padded[:, :wide])
    folded: Floats = padded.reshape(num_rows, -1, width).sum(axis=1, dtype=np.float64)
    return folded.astype(np.float32)


def narrow(rows_NK: Floats32, width: int) -> Halves:
    """Return sketches with ``width`` numbers of half precision.

    Args:
        rows_NK: Sketches ``[N, K]`` of any magnitude.
        width: Width of the result, at most.

    Example:
        >>> halves = narrow(np.array([[3.0, 4.0], [3e30, 4e30]], np.float32), width=2)
        >>> halves.widened()[0].tolist(), halves.exponents_N.tolist()
        ([3.0, 4.0], [-12, 87])
    """
    rows = fold(rows_NK, width).astype(np.float64)
    largest_N = np.abs(rows).max(axis=1, initial=0.0)
    finite_N = np.isfinite(largest_N)
    exponents_N = np.frexp(np.where(finite_N, largest_N, 0.0))[1] - _TOP
    rows[~finite_N] = np.nan
    numbers = np.ldexp(rows, -exponents_N[:, None]).astype(np.float16)
    return Halves(numbers, exponents_N.astype(np.int16))


def consensus_of(sketches_WK: Floats, group_sketches_gWk: Floats) -> Consensus:
    """Compare each worker with all others.

    Args:
        sketches_WK: Narrow sketches of all workers ``[W, K]``.
        group_sketches_gWk: Those of the groups whose turn it is ``[g, W, k]``; g may be 0.

    Example:
        >>> sketches_WK = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> found = consensus_of(sketches_WK, np.empty((0, 4, 2)))
        >>> found.cosine_rest_W.round(3).tolist(), found.cosine_mean  # 2/√5, and 3 of 6 pairs
        ([0.894, 0.894, 0.894, 0.0], 0.5)
    """
    rows_WK, norms_W = _with_direction(sketches_WK)
    total_K = rows_WK.sum(axis=0)
    defined = norms_W[norms_W > 0]
    count = len(defined)
    mean = weighted = float("nan")
    if count >= 2:
        unit_K = (1.0 / np.where(norms_W > 0, norms_W, np.inf)) @ rows_WK
        mean = snapped((float(unit_K @ unit_K) - count) / (count * (count - 1)))
        above = float(total_K @ total_K) - float(defined @ defined)
        weighted = snapped(above / float(defined @ (defined.sum() - defined)))
    groups = [_against_rest(*_with_direction(rows)) for rows in group_sketches_gWk]
    return Consensus(
        num_directions=count,
        cosine_mean=mean,
        cosine_weighted=weighted,
        cosine_rest_W=_against_rest(rows_WK, norms_W),
        group_cosine_rest_Wg=np.array(groups).reshape(len(groups), len(norms_W)).T,
    )


def step_values(consensus: Consensus) -> dict[str, float]:
    """Return the directions' columns of the steps table.

    Returns:
        ``cosine_mean``, ``cosine_weighted``, ``directions_undefined``, and ``cosine_min``, which
        takes pairs and so is NaN here.

    Example:
        >>> sketches_WK = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
        >>> step_values(consensus_of(sketches_WK, np.empty((0, 3, 2))))
        {'cosine_mean': 1.0, 'cosine_weighted': 1.0, 'cosine_min': nan, 'directions_undefined': 1.0}
    """
    num_workers = len(consensus.cosine_rest_W)
    return {
        "cosine_mean": consensus.cosine_mean,
        "cosine_weighted": consensus.cosine_weighted,
        "cosine_min": float("nan"),
        "directions_undefined": float(num_workers - consensus.num_directions),
    }


def _with_direction(rows_WK: Floats) -> tuple[Floats, Floats]:
    """Return rows and their norms, zeros for rows without a direction."""
    rows = np.asarray(rows_WK, np.float64)
    norms_W = np.sqrt(np.einsum("wk,wk->w", rows, rows))
    broken_W = ~np.isfinite(norms_W)
    if broken_W.any():
        rows = np.where(broken_W[:, None], 0.0, rows)
        norms_W = np.where(broken_W, 0.0, norms_W)
    return rows, norms_W


def _against_rest(rows_WK: Floats, norms_W: Floats) -> Floats:
    """Return cosines between rows and the sum of all others ``[W]``; NaN where one vanishes."""
    total_K = rows_WK.sum(axis=0)
    squares_W = norms_W**2
    own_W = rows_WK @ total_K
    total = float(total_K @ total_K)
    products_W = own_W - squares_W
    rests_W = total - 2.0 * own_W + squares_W
    for i in np.flatnonzero(rests_W < _DROWNED * (np.sqrt(total) + norms_W) ** 2):
        rest_K = total_K - rows_WK[i]  # number by number, so that squares do not cancel
        products_W[i] = rows_WK[i] @ rest_K
        rests_W[i] = rest_K @ rest_K
    least_W = _LOST**2 * (squares_W.sum() - squares_W)
    known_W = (norms_W > 0) & (rests_W > least_W)
    below_W = np.where(known_W, norms_W * np.sqrt(np.maximum(rests_W, 0.0)), np.nan)
    cosines_W: Floats = products_W / below_W
    near_W = np.abs(cosines_W) >= 1.0 - ROUNDING
    return np.where(near_W, np.sign(cosines_W), cosines_W)


@functools.lru_cache(maxsize=16)
def _signs(count: int) -> Floats32:
    """Return ±1 for each entry of a sketch, the same on every host."""
    highest_bits = mix(np.arange(1, count + 1)) >> np.uint64(63)
    signs = (1.0 - 2.0 * highest_bits.astype(np.float32)).astype(np.float32)
    signs.flags.writeable = False
    return signs

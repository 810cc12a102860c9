"""The spread of one number over workers, and the spread that sampling alone would give.

Values that are not finite are left out; without any finite value the result is NaN. Spreads are
population standard deviations (ddof 0). Equal values have a spread of exactly 0, and values near
the end of the float64 range do not overflow.

A worker's loss is a mean over samples or micro-batches ("units"). The spread between the units of
one worker gives the spread of means of such units by chance. The ratio of observed to expected
dispersion is then about 1 when the workers draw from the same distribution, near 0 when they share
data, and above 1 when their data differ in kind.

The spread between workers also has exact e-values, by moving their micro-batches around. A worker
brings several *units* in a step: the losses, or the gradient norms, of its micro-batches. Null
hypothesis: given all steps before, the units of a step are exchangeable, each together with its
weight. Then the spread between the workers' means is as likely to be any of those that come out
when the units are dealt anew, and its rank among them is uniform.

For a group G of permutations that leaves the null alone, random ``g_1 … g_B`` of G and the identity
``g_0``, the spreads ``T(g_0 x) … T(g_B x)`` are exchangeable (Hemerik and Goeman, "Exact testing
with random permutations", 2018). So ``e = f(T_0) / mean_b f(T_b)``, with f a function of the
mid-rank among the B + 1, has expectation 1 whatever the distribution of the units: heavy tails,
ties and weights included. G need not hold all permutations: here it holds the rotations of a random
cyclic order, one order and B additions for a step instead of B shuffles.

Two groups, for two nulls:

- *all units*: all units of the step are exchangeable. Workers that share their data have the same
  units, so their means lie closer together than nearly all others.
- *same index*: only units of the same micro-batch index are exchangeable across workers. It holds
  also when the index carries meaning, for instance when batches are sorted by length. It detects a
  worker that is high in all its units, but never equal units.

Legend of shapes: U units of all workers, W workers with units, B rotations with the identity.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.arrays import Floats, Ints, Ragged
from rankscope.stats.bets import AT_ONCE, rank_units


def finite_mean(values_W: NDArray[np.floating]) -> float:
    """Return the mean of the finite values, in their unit.

    Example:
        >>> finite_mean(np.array([1.0, 3.0, np.nan]))
        2.0
    """
    return mean_and_std(values_W)[0]


def population_std(values_W: NDArray[np.floating]) -> float:
    """Return ``sqrt(mean((x − mean(x))²))`` of the finite values, in their unit.

    Example:
        >>> population_std(np.array([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]))  # of eight workers
        2.0
    """
    return mean_and_std(values_W)[1]


def mean_and_std(values_W: NDArray[np.floating]) -> tuple[float, float]:
    """Return :func:`finite_mean` and :func:`population_std` together.

    Example:
        >>> mean_and_std(np.array([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]))
        (5.0, 2.0)
    """
    finite = _finite(values_W)
    count = len(finite)
    if not count:
        return math.nan, math.nan
    exponent = math.frexp(float(np.abs(finite).max()))[1]
    scaled = np.ldexp(finite, -exponent)  # into [-1, 1]
    from_first = scaled - scaled[0]
    mean = from_first.sum() / count
    from_mean = from_first - mean
    std = np.sqrt((from_mean * from_mean).sum() / count)
    return float(np.ldexp(scaled[0] + mean, exponent)), float(np.ldexp(std, exponent))


def value_range(values_W: NDArray[np.floating]) -> float:
    """Return the largest minus the smallest finite value, in their unit; inf if it overflows.

    Example:
        >>> value_range(np.array([2.0, 5.0, np.inf]))
        3.0
    """
    finite = _finite(values_W)
    return float(finite.max()) - float(finite.min()) if finite.size else math.nan


def _finite(values: NDArray[np.floating]) -> Floats:
    wide: Floats = np.asarray(values, np.float64)
    return wide[np.isfinite(wide)]


def weighted_means_and_sems(
    values_U: NDArray[np.floating], weights_U: NDArray[np.floating], lengths_W: Ints
) -> tuple[Floats, Floats]:
    """Return the loss of each worker per label token, and its standard error ``[W]``.

    With shares ``h = w / Σ w`` the mean is ``Σ h v`` and ``sem² = Σ h² (v − mean)² / (1 − h)``.
    The factor ``1/(1 − h)`` undoes that each unit pulls the mean towards itself: the estimate is
    unbiased when a unit's variance is inversely proportional to its tokens, and is the usual one,
    ``s²/b``, when all weights are equal. (Dividing by ``(b−1)/b`` throughout is too small when
    one long sample dominates a batch.)

    Worker after worker has ``lengths_W`` units, of losses ``values_U`` and label tokens
    ``weights_U``. Units of weight 0 are left out, whatever their value. When any weight of a worker
    is NaN (unknown), all its units count alike. The standard error is NaN with fewer than two units
    of positive weight; both are NaN without any, or when a weight is negative or infinite. A unit
    that is not finite makes the mean so too.

    Example:
        >>> values, weights = np.array([1.0, 3.0, 5.0]), np.array([1.0, 1.0, 8.0])
        >>> means, sems = weighted_means_and_sems(values, weights, np.array([2, 1]))
        >>> means.tolist(), sems.tolist()
        ([2.0, 5.0], [1.0, nan])
    """
    values = np.asarray(values_U, np.float64)
    weights = np.asarray(weights_U, np.float64)
    if values.shape != weights.shape:
        raise ValueError(f"expected one weight per value, got {weights.shape} for {values.shape}")
    units = Ragged(values, lengths_W), Ragged(weights, lengths_W)
    if not ((weights > 0) & (weights < np.inf)).all():
        units = _counted(*units)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return _means_and_sems(*units)


def _counted(values: Ragged, weights: Ragged) -> tuple[Ragged, Ragged]:
    """Return the units that count, and their weights."""
    lengths_W = weights.lengths_R
    unknown_W = Ragged(np.isnan(weights.flat), lengths_W).reduced(np.logical_or, False)
    known_U = np.where(weights.spread(unknown_W), 1.0, weights.flat)
    usable_U = (known_U >= 0) & np.isfinite(known_U)
    usable_W = Ragged(usable_U, lengths_W).reduced(np.logical_and, True)
    counts_U = weights.spread(usable_W) & (known_U > 0)
    return values.where(counts_U), Ragged(known_U, lengths_W).where(counts_U)


def _means_and_sems(values: Ragged, weights: Ragged) -> tuple[Floats, Floats]:
    """Return the same for positive weights."""
    lengths_W = values.lengths_R
    some_W = lengths_W > 0
    first_W = np.full(len(values), np.nan)
    first_W[some_W] = values.flat[values.firsts[some_W]]
    shares_U = weights.flat / weights.spread(weights.reduced(np.add, 0.0))
    above_U = shares_U * (values.flat - values.spread(first_W))
    mean_W = first_W + Ragged(above_U, lengths_W).reduced(np.add, 0.0)
    sem_W = _sems(shares_U, Ragged(values.flat - values.spread(mean_W), lengths_W))
    odd_U = ~np.isfinite(values.flat)
    if odd_U.any():
        odd = values.where(odd_U)
        odd_W = odd.lengths_R > 0
        mean_W[odd_W] = odd.reduced(np.add, 0.0)[odd_W]  # inf or -inf if only that occurs, else NaN
        sem_W[odd_W] = np.nan
    return mean_W, sem_W


def _sems(shares_U: Floats, deviations: Ragged) -> Floats:
    lengths_W = deviations.lengths_R
    largest_W = Ragged(np.abs(deviations.flat), lengths_W).reduced(np.maximum, 0.0)
    rest_U = 1 - shares_U
    scaled_U = shares_U * (deviations.flat / deviations.spread(largest_W))
    # a unit with all the weight, to rounding, deviates from itself by nothing
    terms_U = np.where(rest_U > 0, scaled_U**2 / rest_U, 0.0)
    sem_W: Floats = largest_W * np.sqrt(Ragged(terms_U, lengths_W).reduced(np.add, 0.0))
    sem_W[largest_W == 0.0] = 0.0
    return np.where(lengths_W < 2, np.nan, sem_W)


def expected_std(sems_W: NDArray[np.floating]) -> float:
    """Return the loss std over workers (ddof 0) that sampling alone would give.

    The expected population variance of W independent values with standard errors ``s_i`` and one
    true mean is ``(W−1)/W · mean(s²)``, whose root this is. Values not finite are left out; NaN
    with fewer than two others.

    Example:
        >>> round(expected_std(np.array([2.0, 2.0, 2.0, 2.0])), 6)  # √(3/4 · 2²)
        1.732051
    """
    sems = np.asarray(sems_W, np.float64)
    sems = sems[np.isfinite(sems)]
    if len(sems) < 2:
        return float("nan")
    largest = float(sems.max()) or 1.0
    mean_square = float(np.mean((sems / largest) ** 2))
    return largest * float(np.sqrt((len(sems) - 1) / len(sems) * mean_square))


STRENGTHS = (0.4, 0.9)
"""Exponents κ of the bets ``f = rank^−κ``: for small deviations, and for large ones."""

_POWERS = -np.array(STRENGTHS)[:, None]

MOST_ROTATIONS = 64
LEAST_ROTATIONS = 16
_ROTATED_UNITS = 2**16
_TIE = 2.0**-30
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Units:
    """The units of one step, worker by worker."""

    values_U: Floats
    weights_U: Floats  # positive
    index_U: Ints  # its micro-batch index inside its worker
    starts_W: Ints  # where the units of each worker begin; only workers that have any


def pool_units(
    values: Sequence[Floats], weights: Sequence[Floats] | None = None, *, from_index: int = 0
) -> Units | None:
    """Return the units of all workers, or None when they cannot be compared.

    Without weights, or with any NaN (unknown) or infinity, all units count alike; those of weight 0
    are left out. ``from_index`` is the micro-batch index of the first unit used of each worker.
    None with units of fewer than two workers, with no worker that has two, and when a unit is not
    finite.

    Example:
        >>> units = pool_units([np.array([1.0, 2.0]), np.array([3.0, 4.0])])
        >>> units.values_U.tolist(), units.index_U.tolist(), units.starts_W.tolist()
        ([1.0, 2.0, 3.0, 4.0], [0, 1, 0, 1], [0, 2])
    """
    lengths = [len(worker) for worker in values]
    if max(lengths, default=0) < 2:
        return None
    lengths_W = np.array(lengths, np.int64)
    flat_U = np.concatenate(values)
    weights_U = np.ones(len(flat_U)) if weights is None else np.concatenate(weights)
    if len(weights_U) != len(flat_U) or not np.isfinite(weights_U).all():
        weights_U = np.ones(len(flat_U))
    begins_W = lengths_W.cumsum() - lengths_W
    owners_begin_U = begins_W.repeat(lengths_W)
    index_U = np.arange(len(flat_U)) - owners_begin_U
    starts_W = begins_W[lengths_W > 0]
    kept_U = (index_U >= from_index) & (weights_U > 0)
    if not kept_U.all():
        flat_U = flat_U[kept_U]
        weights_U = weights_U[kept_U]
        index_U = index_U[kept_U]
        starts_W = np.diff(owners_begin_U[kept_U], prepend=-1).nonzero()[0]
    usable = 2 <= len(starts_W) < len(flat_U) and np.isfinite(flat_U).all()
    return Units(flat_U, weights_U, index_U, starts_W) if usable else None


def spread_ranks(units: Units, rng: np.random.Generator, *, same_index: bool) -> Floats:
    """Rank the spread between workers among those that other deals of the units would give.

    The spread is ``T = Σ_i (Σ_u w_u (v_u − m))²``, over workers i and their units u, with m the
    weighted mean of all units: for equal weights, U²/W times the variance of the workers' means.

    Returned are mid-ranks in (0, 1) ``[B]`` of the observed spread, at 0, and of the others; those
    equal up to rounding share the middle of their ranks. ``rng`` must not depend on the values of
    this step. ``same_index``: units move only inside the same micro-batch index.

    Example:
        >>> units = pool_units([np.array([1.0, 2.0, 3.0, 4.0])] * 4)  # all have the same data
        >>> ranks_B = spread_ranks(units, np.random.default_rng(0), same_index=False)
        >>> len(ranks_B), float(ranks_B[0])
        (16, 0.03125)
    """
    groups_U = units.index_U if same_index else np.zeros(len(units.values_U), np.int64)
    circles, places_U, shifts_BG = _rotations(groups_U, rng)
    largest = float(np.abs(units.values_U).max()) or 1.0
    values_U = units.values_U / largest
    weights_U = units.weights_U / float(units.weights_U.max())
    values_U -= float(np.dot(weights_U, values_U)) / float(weights_U.sum())
    products_U = weights_U * values_U
    products = products_U[circles]
    spreads_B = np.empty(len(shifts_BG))
    rows = max(AT_ONCE // len(groups_U), 1)
    for start in range(0, len(shifts_BG), rows):
        shifts = shifts_BG[start : start + rows]
        turned_BU = places_U + (shifts.take(groups_U, axis=1) if shifts.shape[1] > 1 else shifts)
        sums_BW = np.add.reduceat(products.take(turned_BU), units.starts_W, axis=1)
        spreads_B[start : start + rows] = np.einsum("bw,bw->b", sums_BW, sums_BW)
    tie = max(_TIE * float(np.dot(products_U, values_U)), _ROUNDING**2 * len(values_U))
    doubled_B = rank_units(np.rint(spreads_B / tie)[None]).doubled_SU[0]
    ranks_B: Floats = (doubled_B + 1) / 2 / len(spreads_B)
    return ranks_B


def rank_bets(ranks_B: Floats) -> tuple[Floats, Floats]:
    """Return the e-values of bets on a low and on a high rank, one per entry of ``STRENGTHS``.

    Given are mid-ranks in (0, 1), that of the observation at 0.

    Example:
        >>> low, high = rank_bets(np.array([0.125, 0.375, 0.625, 0.875]))  # the lowest of four
        >>> low.round(2).tolist(), high.round(2).tolist()
        ([1.52, 2.25], [0.7, 0.39])
    """
    low = ranks_B**_POWERS
    high = (1 - ranks_B) ** _POWERS
    return low[:, 0] / low.mean(axis=1), high[:, 0] / high.mean(axis=1)


def _rotations(
    groups_U: Ints, rng: np.random.Generator
) -> tuple[Ints, NDArray[np.int32], NDArray[np.int32]]:
    """Deal the units anew: random circles, one for each group, turn by random numbers of places.

    A single circle of few units is turned to each of its places once. Returns the circles, written
    down twice each ``[2U]``; where in there the unit of each place stands ``[U]``; and how far each
    circle turns ``[B, G]``. Rotation 0 leaves all where they are.
    """
    size = len(groups_U)
    sizes_G = np.bincount(groups_U)
    one = len(sizes_G) == 1
    order_U = rng.permutation(size) if one else np.argsort(groups_U + rng.random(size))
    starts_G = np.cumsum(sizes_G) - sizes_G
    places_U = np.empty(size, np.int32)
    places_U[order_U] = np.arange(size, dtype=np.int32)
    places_U += starts_G.astype(np.int32)[groups_U]
    twice = _each_twice(order_U, sizes_G.tolist())
    if one and size <= MOST_ROTATIONS:
        return twice, places_U, np.arange(size, dtype=np.int32)[:, None]
    count = min(max(_ROTATED_UNITS // size, LEAST_ROTATIONS), MOST_ROTATIONS)
    shifts_BG = rng.integers(0, np.maximum(sizes_G, 1), (count, len(sizes_G)), np.int32)
    shifts_BG[0] = 0
    return twice, places_U, shifts_BG


def _each_twice(order_U: Ints, sizes: list[int]) -> Ints:
    """Return consecutive pieces of these sizes, each followed by a copy of itself ``[2U]``."""
    if sizes.count(sizes[0]) == len(sizes):
        pieces_GU = order_U.reshape(len(sizes), sizes[0])
        return np.concatenate([pieces_GU, pieces_GU], axis=1).reshape(-1)
    ends = list(accumulate(sizes))
    pieces = [order_U[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return np.concatenate([piece for piece in pieces for _ in range(2)])

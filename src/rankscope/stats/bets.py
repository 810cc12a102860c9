"""Bets on one unit (a worker, or a pair of them) being unlike the others within a step.

Under the null hypothesis the units of a step are exchangeable, given all steps before. Then for
any f ≥ 0 that treats them alike, ``e_i = f(x_i) / mean_j f(x_j)`` has expectation 1: an exact
e-value (Vovk and Wang, "E-values", 2021; ranks as in Shin, Ramdas and Rinaldo, "E-detectors",
2022). Each bet is such an f, strong against one kind of fault:

- *up* and *down*, in three strengths: ``f = exp(±λ·score)`` of the rank's normal score. A shift by
  δ standard deviations is caught fastest by λ ≈ δ.
- *spread*: ``f = exp(λ·score)`` of the rank of the distance from the median: a unit that is now
  high, now low.
- *rare*: only distances of more than 4.5 robust standard deviations count, in proportion to their
  size: a large error now and then. Ranks alone would take hundreds of steps for it, since they do
  not see how large it is.

Legend of shapes: T steps, S signals, R signals of a step, U units, B bets, n units present, D
doubled mid-ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from enum import Enum
from functools import cache, lru_cache
from itertools import groupby
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.arrays import Bools, Floats, Floats32, Ints
from rankscope.stats.state import Stateful

STRENGTHS = (0.75, 1.6, 4.0)
"""The λ of shifts, in standard deviations."""

SPREAD_STRENGTH = 1.2
RARE_FROM = 4.5
"""Robust standard deviations from which a distance counts as a large error."""

RARE_STAKE = 0.85
"""The share of a bet that is lost when another unit has the large error."""

Rows = Ints | slice
"""Which signals: ascending indices, or the slice that holds the same ones."""

AT_ONCE = 2**13
"""Largest number of values to rank at once: larger arrays fall out of the cache."""

_LARGEST_Z = 1e6
_MAD_TO_STD = 1.4826
_MEMORY = 0.02


class BetKind(Enum):
    """The kind of difference that a bet is on."""

    UP = "high"
    DOWN = "low"
    SPREAD = "spread"
    RARE = "rare"


@dataclass(frozen=True, slots=True)
class Bet:
    """One bet."""

    kind: BetKind
    strength: float  # its λ; 0 for *rare*
    weight: float  # its share of the evidence of its signal


def worker_bets() -> tuple[Bet, ...]:
    """Return the bets on workers: shifts both ways, spread, rare large errors.

    Example:
        >>> [bet.kind.value for bet in worker_bets()[-2:]], sum(bet.weight for bet in worker_bets())
        (['spread', 'rare'], 1.0)
    """
    shift = 0.7 / (2 * len(STRENGTHS))
    return (
        *(Bet(BetKind.UP, strength, shift) for strength in STRENGTHS),
        *(Bet(BetKind.DOWN, strength, shift) for strength in STRENGTHS),
        Bet(BetKind.SPREAD, SPREAD_STRENGTH, 0.15),
        Bet(BetKind.RARE, 0.0, 0.15),
    )


def pair_bets() -> tuple[Bet, ...]:
    """Return the bets on pairs: too much alike.

    Example:
        >>> [bet.strength for bet in pair_bets()]
        [0.75, 1.6, 4.0]
    """
    return tuple(Bet(BetKind.UP, strength, 1 / len(STRENGTHS)) for strength in STRENGTHS)


@dataclass(frozen=True, slots=True)
class Scales:
    """The robust standard deviations of several signals, step after step."""

    used_TR: Floats  # the scale used for each step; NaN where unknown
    past_TR: Floats  # the scale learnt up to each step; NaN before the first one of use
    count_TR: Floats  # from how many steps


def steady_scales(past_R: Floats, count_R: Floats, current_TR: Floats) -> Scales:
    """Return a robust standard deviation per signal, of each step and of those before it.

    The median distance from the median of eight workers errs by a third; the past steadies it. It
    follows when all units spread out together. A step in which more than half of the units are
    equal, or too few are present, does not show their usual distance: nothing is learnt from it.

    ``past_R`` are the scales before the first step, from ``count_R`` steps; ``current_TR`` those of
    each step alone, NaN where unknown.

    Example:
        >>> nothing, steps = np.full(1, np.nan), np.array([[1.0], [3.0], [1.0]])
        >>> steady_scales(nothing, np.zeros(1), steps).used_TR.tolist()  # 2 after two
        [[1.0], [1.5], [2.0]]
    """
    learns_TR = (current_TR > 0) & (current_TR < np.inf)
    count_TR = count_R + np.add.accumulate(learns_TR, axis=0, dtype=np.float64)
    gain_TR = np.maximum(1 / np.maximum(count_TR, 1), _MEMORY)
    used_TR = np.empty_like(current_TR)
    past_TR = np.empty_like(current_TR)
    past = past_R
    all_known = bool(np.isfinite(past).all()) and bool(learns_TR.all())
    for at, current in enumerate(current_TR):
        used = np.maximum(past, current / 2)
        learnt = (1 - gain_TR[at]) * past + gain_TR[at] * current
        if not all_known:
            known = np.isfinite(past)
            used = np.where(known, used, current)
            learnt = np.where(learns_TR[at], np.where(known, learnt, current), past)
        used_TR[at] = used
        past_TR[at] = past = learnt
    return Scales(used_TR, past_TR, count_TR)


@dataclass(frozen=True, slots=True)
class Ranked:
    """The units of some signals, in order."""

    values_SU: Floats  # as given, NaN where a unit is missing
    sorted_SU: Floats  # each row in order; missing ones last
    doubled_SU: NDArray[np.int32]  # twice the mid-rank from 0 of each unit; −1 where it is missing
    counts_S: Ints  # n, how many units are present
    tied_S: Bools  # whether a row holds equal values
    count: int | None  # n where it is the same in all rows, else None


def rank_units(values_SU: Floats) -> Ranked:
    """Sort each row; equal values share the middle of their ranks.

    Example:
        >>> rank_units(np.array([[30.0, 10.0, 10.0, np.nan]])).doubled_SU.tolist()
        [[4, 1, 1, -1]]
    """
    num_signals, width = values_SU.shape
    row_starts_S1 = _row_starts(num_signals, width)
    places_SU = values_SU.argsort(axis=1)
    places_SU += row_starts_S1  # where each value of the sorted rows stands among all
    ordered = values_SU.take(places_SU)
    begins = np.ones(values_SU.size + 1, bool)  # runs of equal values, and the end of the last
    begins_SU = begins[:-1].reshape(num_signals, width)
    np.not_equal(ordered[:, 1:], ordered[:, :-1], out=begins_SU[:, 1:])
    if np.count_nonzero(begins) == len(begins):
        tied_S = np.zeros(num_signals, bool)
        doubled_sorted = _even_numbers(width)
    else:
        tied_S = ~np.logical_and.reduce(begins_SU, axis=1)
        starts = begins.nonzero()[0]
        first_plus_last = starts[:-1] + starts[1:] - 1
        doubled_sorted = first_plus_last.repeat(starts[1:] - starts[:-1])
        doubled_sorted = doubled_sorted.reshape(num_signals, width) - 2 * row_starts_S1
    counts_S = np.full(num_signals, width)
    count = width
    if np.count_nonzero(np.isnan(ordered[:, -1])):
        missing = np.isnan(ordered)
        doubled_sorted = np.where(missing, -1, doubled_sorted)
        counts_S -= np.count_nonzero(missing, axis=1)
        count = counts_S[0].item() if (counts_S == counts_S[0]).all() else None
    doubled = np.empty((num_signals, width), np.int32)
    doubled.reshape(-1)[places_SU] = doubled_sorted
    return Ranked(values_SU, ordered, doubled, counts_S, tied_S, count)


@lru_cache(maxsize=1024)
def _row_starts(num_rows: int, width: int) -> Ints:
    """Return where each row begins in a flattened array ``[num_rows, 1]``."""
    return width * np.arange(num_rows)[:, None]


@cache
def _even_numbers(count: int) -> Ints:
    return 2 * np.arange(count)


def medians(ranked: Ranked) -> Floats:
    """Return the median of each row over the units present, NaN without any.

    Example:
        >>> medians(rank_units(np.array([[3.0, 1.0, 2.0, np.nan], [1.0, 2.0, 3.0, 4.0]]))).tolist()
        [2.0, 2.5]
    """
    last = ranked.sorted_SU.shape[1] - 1
    middle: Floats
    if ranked.count is not None:
        lower = max(ranked.count - 1, 0) // 2
        upper = min(ranked.count // 2, last)
        middle = ranked.sorted_SU[:, lower] + ranked.sorted_SU[:, upper]
    else:
        rows = np.arange(len(ranked.counts_S))
        lower_S = np.maximum(ranked.counts_S - 1, 0) // 2
        upper_S = np.minimum(ranked.counts_S // 2, last)
        middle = ranked.sorted_SU[rows, lower_S] + ranked.sorted_SU[rows, upper_S]
    middle /= 2
    return middle


def distances(ranked: Ranked) -> tuple[Floats, Ranked, Floats]:
    """Return the median ``[S]``, the ranked distances from it, and their robust scale ``[S]``.

    Example:
        >>> middle_S, away, scale_S = distances(rank_units(np.array([[1.0, 2.0, 3.0, 4.0, 100.0]])))
        >>> middle_S.tolist(), away.values_SU.tolist(), scale_S.tolist()
        ([3.0], [[2.0, 1.0, 0.0, 1.0, 97.0]], [1.4826])
    """
    middle_S = medians(ranked)
    with np.errstate(over="ignore", invalid="ignore"):
        away = rank_units(np.abs(ranked.values_SU - middle_S[:, None]))
    return middle_S, away, _MAD_TO_STD * medians(away)


@lru_cache(maxsize=256)
def normal_scores(count: int) -> Floats:
    """Return the normal score of each doubled mid-rank among ``count`` units ``[2·count − 1]``.

    Example:
        >>> normal_scores(3).round(2).tolist()  # of ranks 1, 1.5, 2, 2.5 and 3
        [-0.87, -0.4, 0.0, 0.4, 0.87]
    """
    ranks = np.arange(2 * count - 1) / 2 + 1
    return np.array([NormalDist().inv_cdf((r - 0.375) / (count + 0.25)) for r in ranks])


class Betting:
    """Bets, prepared once.

    Example:
        >>> ranked, e_BSU = rank_units(np.array([[1.0, 2.0, 9.0]])), np.empty((1, 1, 3), np.float32)
        >>> middle_S, away, scales_S = distances(ranked)
        >>> Betting([Bet(BetKind.UP, 1.6, 1.0)]).write_e_values(ranked, away, scales_S, e_BSU)
        >>> e_BSU.astype(float).round(2).tolist()  # of mean 1, whatever the values
        [[[0.14, 0.57, 2.29]]]
    """

    def __init__(self, bets: Sequence[Bet]) -> None:
        self._runs: list[tuple[slice, BetKind, tuple[float, ...]]] = []
        start = 0
        for kind, run in groupby(
            bets, lambda bet: BetKind.UP if bet.kind is BetKind.DOWN else bet.kind
        ):
            strengths = [-bet.strength if bet.kind is BetKind.DOWN else bet.strength for bet in run]
            place = slice(start, start + len(strengths))
            self._runs.append((place, kind, tuple(strengths)))
            start = place.stop

    def write_e_values(
        self, ranked: Ranked, away: Ranked, scales_S: Floats, out_BSU: Floats32
    ) -> None:
        """Write the e-value of every bet, signal and unit into ``out_BSU``; 1 for missing units.

        ``away`` holds the ranked distances from the median, ``scales_S`` the robust standard
        deviations.
        """
        counts = [ranked.count] if ranked.count is not None else np.unique(ranked.counts_S).tolist()
        for count in counts:
            rows = slice(None) if len(counts) == 1 else np.flatnonzero(ranked.counts_S == count)
            for bets, kind, strengths in self._runs:
                if count < (2 if kind is BetKind.UP else 3):
                    out_BSU[bets, rows] = 1
                elif kind is BetKind.RARE:
                    out_BSU[bets, rows] = _rare(away.values_SU[rows], scales_S[rows], count)
                else:
                    source = away if kind is BetKind.SPREAD else ranked
                    out_BSU[bets, rows] = _by_rank(source, rows, count, strengths)


@lru_cache(maxsize=1024)
def _stakes(count: int, strengths: tuple[float, ...]) -> Floats32:
    """Return f of every rank over its mean without ties, and 1 for missing units ``[B, D + 1]``."""
    stakes = np.ones((len(strengths), 2 * count), np.float32)
    for strength, stakes_D in zip(strengths, stakes, strict=True):
        f = np.exp(strength * normal_scores(count))
        stakes_D[:-1] = f / f[::2].mean()
    return stakes


def _by_rank(ranked: Ranked, rows: Rows, count: int, strengths: tuple[float, ...]) -> Floats32:
    """Return the e-values of bets on the rank ``[B, S, U]``."""
    doubled_SU = ranked.doubled_SU[rows]
    tied_S = ranked.tied_S[rows]
    e: Floats32 = _stakes(count, strengths).take(doubled_SU, axis=1, mode="wrap")
    if np.count_nonzero(tied_S):
        present = None if ranked.count == doubled_SU.shape[1] else doubled_SU >= 0
        where = True if present is None else present
        means_BS1 = np.add.reduce(e, axis=2, where=where, keepdims=True) / count
        means_BS1[:, ~tied_S] = 1
        e /= means_BS1
        if present is not None:
            e[:, ~present] = 1
    return e


def _rare(distances_SU: Floats, scales_S: Floats, count: int) -> Floats32 | float:
    """Return the e-values of a bet on rare large errors ``[S, U]``; 1 without any."""
    scales = scales_S[:, None]
    far = distances_SU > RARE_FROM * scales
    far &= scales > 0
    if not np.count_nonzero(far):
        return 1.0
    e = np.ones(distances_SU.shape, np.float32)
    hit = np.flatnonzero(far.any(axis=1))
    z = np.minimum(distances_SU[hit] / scales[hit], _LARGEST_Z)
    f = np.where(far[hit], z, 0.0)
    share = f / f.sum(axis=1, keepdims=True)
    e_hit = 1 - RARE_STAKE + RARE_STAKE * count * share
    e[hit] = np.where(np.isnan(distances_SU[hit]), 1.0, e_hit)
    return e


_LARGEST = np.float32(1e30)
_ONE = np.float32(1)


class ShiryaevRoberts(Stateful):
    """An array of e-detectors: ``R_t = (1 + R_{t−1})·e_t``.

    It sums, over all steps at which a fault may have begun, the evidence since then. When each e_t
    has an expectation of at most 1 given the past, ``R_t − t`` is a supermartingale, and by Doob's
    inequality R reaches c within N steps with a probability of at most N/c (Shin, Ramdas and
    Rinaldo, "E-detectors: a nonparametric framework for sequential change detection", 2022; the
    statistic is Shiryaev's and Roberts').

    ``evidence`` is R of each, 0 at first, float32. ``age`` is how many steps ago the fault began,
    this one included: the mean over all beginnings in proportion to their evidence. It counts steps
    in which the detector was fed.

    Example:
        >>> detector = ShiryaevRoberts(2)
        >>> for _ in range(3):
        ...     detector.observe(np.array([1.0, 2.0], np.float32))
        >>> detector.evidence.tolist()  # 3 steps of nothing; ((0 + 1)·2 + 1)·2 …
        [3.0, 14.0]
    """

    def __init__(self, *shape: int) -> None:
        self.evidence = np.zeros(shape, np.float32)
        self.age = np.zeros(shape, np.float32)

    def observe(self, e: Floats32, at: Any = ...) -> None:
        """Add the e-values of a step, of the shape of ``evidence[at]``, to these detectors."""
        evidence = self.evidence[at]
        age = self.age[at]  # in place where `at` is a slice
        age *= evidence
        evidence += _ONE
        age /= evidence
        age += _ONE
        evidence *= e
        np.minimum(evidence, _LARGEST, out=evidence)
        if evidence.base is not self.evidence:
            self.evidence[at] = evidence
            self.age[at] = age

    def restart(self, at: Any) -> None:
        """Forget all evidence of some detectors; their part of the budget stays spent."""
        self.evidence[at] = 0
        self.age[at] = 0


THRESHOLD = 1e6
"""A healthy run of N steps raises any statistical finding with a probability of at most N / this.

Each family of detectors owns a share s: its e-detector M, whose expectation after n healthy steps
is at most n, alarms at ``THRESHOLD / s``. The shares sum to 1."""

OUTLIERS = 0.8
"""Share of the search for workers that differ from the others, half totals and half groups."""

AMOUNTS = 0.05
"""Share of the search for workers whose amount of data differs."""

ROLLOUTS = 0.05
"""Share of the search for workers whose rollouts do not come from their trainer."""

PAIRS = 0.05
"""Share of the search for workers that resemble each other too much."""

SAMPLING = 0.05
"""Share of the comparison of workers with what sampling explains."""

assert math.fsum([OUTLIERS, AMOUNTS, ROLLOUTS, PAIRS, SAMPLING]) <= 1.0

FAR_BELOW = 0.99
"""Part of a level below which a bound on the evidence decides; rounding changes sums far less."""


def alarm_level(share: float) -> float:
    """Return the value of an e-detector at which a family with this share of the budget alarms.

    Example:
        >>> alarm_level(PAIRS)
        20000000.0
    """
    return THRESHOLD / share


def false_alarm_bound(num_steps: int) -> float:
    """Return the largest probability that a healthy run of so many steps raises any finding.

    Example:
        >>> false_alarm_bound(10_000)
        0.01
    """
    return min(1.0, num_steps / THRESHOLD)


def bound_in_words(num_steps: int) -> str:
    """Return the bound with one digit, rounded up, so that it stays a bound.

    >>> bound_in_words(300), bound_in_words(14_900)
    ('0.0003', '0.02')
    """
    bound = Context(prec=1, rounding=ROUND_CEILING).divide(Decimal(num_steps), Decimal(THRESHOLD))
    return f"{min(1.0, float(bound)):.1g}"

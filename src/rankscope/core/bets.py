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

Legend of shapes: S signals, U units, B bets, n units present.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.core.arrays import Floats, Floats32, Ints
from rankscope.core.state import Stateful

STRENGTHS = (0.75, 1.6, 4.0)
"""The λ of shifts, in standard deviations."""

SPREAD_STRENGTH = 1.2
RARE_FROM = 4.5
"""Robust standard deviations from which a distance counts as a large error."""

RARE_STAKE = 0.85
"""What is lost, as a share, when another unit has the large error."""

_LARGEST_Z = 1e6
_MAD_TO_STD = 1.4826
_MEMORY = 0.02


class Kind(Enum):
    """What a bet is on."""

    UP = "high"
    DOWN = "low"
    SPREAD = "spread"
    RARE = "rare"


@dataclass(frozen=True, slots=True)
class Bet:
    """One bet.

    Attributes:
        kind: What it is on.
        strength: Its λ; 0 for *rare*.
        weight: Its share of the evidence of its signal.
    """

    kind: Kind
    strength: float
    weight: float


def worker_bets() -> tuple[Bet, ...]:
    """Return the bets on workers: shifts both ways, spread, rare large errors."""
    shift = 0.7 / (2 * len(STRENGTHS))
    return (
        *(Bet(Kind.UP, strength, shift) for strength in STRENGTHS),
        *(Bet(Kind.DOWN, strength, shift) for strength in STRENGTHS),
        Bet(Kind.SPREAD, SPREAD_STRENGTH, 0.15),
        Bet(Kind.RARE, 0.0, 0.15),
    )


def pair_bets() -> tuple[Bet, ...]:
    """Return the bets on pairs: too much alike."""
    return tuple(Bet(Kind.UP, strength, 1 / len(STRENGTHS)) for strength in STRENGTHS)


class RobustScale(Stateful):
    """A robust standard deviation per signal, of this step and of the recent past.

    The median distance from the median of eight workers errs by a third; the past steadies it. It
    follows when all units spread out together.

    Args:
        num_signals: S.
    """

    def __init__(self, num_signals: int) -> None:
        self.past_S = np.full(num_signals, np.nan)
        self.count_S = np.zeros(num_signals)

    def observe(self, current_S: Floats, rows: Ints) -> Floats:
        """Return the scale of these signals, given the one of this step alone."""
        past = self.past_S[rows]
        self.count_S[rows] += 1
        gain = np.maximum(1 / self.count_S[rows], _MEMORY)
        known = np.isfinite(past)
        self.past_S[rows] = np.where(known, (1 - gain) * past + gain * current_S, current_S)
        return np.where(known, np.maximum(past, current_S / 2), current_S)


@dataclass(frozen=True, slots=True)
class Ranked:
    """The units of some signals, in order.

    Attributes:
        values_SU: As given, NaN where a unit is missing.
        sorted_SU: Each row in order; missing ones last.
        doubled_SU: Twice the mid-rank from 0 of each unit; −1 where it is missing.
        counts_S: n, how many units are present.
        tied_S: Whether a row holds equal values.
    """

    values_SU: Floats
    sorted_SU: Floats
    doubled_SU: NDArray[np.int32]
    counts_S: Ints
    tied_S: NDArray[np.bool_]


def rank_units(values_SU: Floats) -> Ranked:
    """Sort each row; equal values share the middle of their ranks."""
    order = np.argsort(values_SU, axis=1)
    ordered = np.take_along_axis(values_SU, order, axis=1)
    num_signals, width = values_SU.shape
    tied_S = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    doubled_sorted = np.tile(2 * np.arange(width, dtype=np.int32), (num_signals, 1))
    if tied_S.any():
        doubled_sorted[tied_S] = _with_ties(ordered[tied_S])
    missing = np.isnan(ordered)
    if missing.any():
        doubled_sorted[missing] = -1
    doubled = np.empty_like(doubled_sorted)
    np.put_along_axis(doubled, order, doubled_sorted, axis=1)
    counts_S = width - np.count_nonzero(missing, axis=1)
    return Ranked(values_SU, ordered, doubled, counts_S, tied_S)


def _with_ties(ordered_SU: Floats) -> Ints:
    """Return first plus last index of each run of equal values."""
    width = ordered_SU.shape[1]
    index = np.broadcast_to(np.arange(width), ordered_SU.shape)
    new = np.ones(ordered_SU.shape, bool)
    new[:, 1:] = ordered_SU[:, 1:] != ordered_SU[:, :-1]
    first = np.maximum.accumulate(np.where(new, index, 0), axis=1)
    last_of = np.ones(ordered_SU.shape, bool)
    last_of[:, :-1] = new[:, 1:]
    backwards = np.where(last_of, index, width)[:, ::-1]
    last = np.minimum.accumulate(backwards, axis=1)[:, ::-1]
    return first + last


def medians(ranked: Ranked) -> Floats:
    """Return the median of each row over the units present, NaN without any."""
    rows = np.arange(len(ranked.counts_S))
    lower = np.maximum(ranked.counts_S - 1, 0) // 2
    upper = np.minimum(ranked.counts_S // 2, ranked.sorted_SU.shape[1] - 1)
    middle: Floats = (ranked.sorted_SU[rows, lower] + ranked.sorted_SU[rows, upper]) / 2
    return middle


def distances(ranked: Ranked) -> tuple[Floats, Ranked, Floats]:
    """Return the median ``[S]``, the ranked distances from it, and their robust scale ``[S]``."""
    middle_S = medians(ranked)
    with np.errstate(over="ignore", invalid="ignore"):
        away = rank_units(np.abs(ranked.values_SU - middle_S[:, None]))
    return middle_S, away, _MAD_TO_STD * medians(away)


@lru_cache(maxsize=256)
def normal_scores(count: int) -> Floats:
    """Return the normal score of each doubled mid-rank among ``count`` units ``[2·count − 1]``."""
    ranks = np.arange(2 * count - 1) / 2 + 1
    return np.array([NormalDist().inv_cdf((r - 0.375) / (count + 0.25)) for r in ranks])


def e_values(
    ranked: Ranked, away: Ranked, scales_S: Floats, bets: Sequence[Bet], out_BSU: Floats32
) -> None:
    """Write the e-value of every bet, signal and unit into ``out``; 1 where a unit is missing."""
    counts = np.unique(ranked.counts_S).tolist()
    for count in counts:
        rows = slice(None) if len(counts) == 1 else np.flatnonzero(ranked.counts_S == count)
        for index, bet in enumerate(bets):
            if count < 2 or (count < 3 and bet.kind in (Kind.SPREAD, Kind.RARE)):
                out_BSU[index, rows] = 1
            elif bet.kind is Kind.RARE:
                out_BSU[index, rows] = _rare(away.values_SU[rows], scales_S[rows], count)
            else:
                source = away if bet.kind is Kind.SPREAD else ranked
                signed = -bet.strength if bet.kind is Kind.DOWN else bet.strength
                out_BSU[index, rows] = _by_rank(source, rows, count, signed)


@lru_cache(maxsize=1024)
def _stakes(count: int, strength: float) -> Floats32:
    """Return f of every doubled mid-rank over its mean without ties, and 1 for a missing unit."""
    f = np.exp(strength * normal_scores(count))
    return np.append(f / f[::2].mean(), 1.0).astype(np.float32)


def _by_rank(ranked: Ranked, rows: Any, count: int, strength: float) -> Floats32:
    doubled_SU, tied_S = ranked.doubled_SU[rows], np.flatnonzero(ranked.tied_S[rows])
    e: Floats32 = _stakes(count, strength).take(doubled_SU, mode="wrap")
    if len(tied_S):
        present = doubled_SU[tied_S] >= 0
        totals = np.sum(e[tied_S], axis=1, where=present, keepdims=True)
        e[tied_S] = np.where(present, e[tied_S] / (totals / count), 1)
    return e


def _rare(distances_SU: Floats, scales_S: Floats, count: int) -> Floats32:
    scales = scales_S[:, None]
    far = distances_SU > RARE_FROM * scales
    far &= scales > 0
    e = np.ones(distances_SU.shape, np.float32)
    hit = np.flatnonzero(far.any(axis=1))
    if len(hit):
        z = np.minimum(distances_SU[hit] / scales[hit], _LARGEST_Z)
        f = np.where(far[hit], z, 0.0)
        share = f / f.sum(axis=1, keepdims=True)
        e_hit = 1 - RARE_STAKE + RARE_STAKE * count * share
        e[hit] = np.where(np.isnan(distances_SU[hit]), 1.0, e_hit)
    return e

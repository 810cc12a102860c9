"""The residual of a healthy reduction, by group of parameters: from rounding, and from its past.

A residual is the distance of the reduced gradient from the mean of the workers' gradients, over the
norm of the reduced one. It has two causes in a healthy run, and both grow where the workers'
gradients cancel, by ``kappa = sqrt(sum |g_i|^2) / |sum g_i|``:

- sketches, which add up in float32: at most ``SKETCH_FLOOR * sqrt((1 + kappa^2) / 2)`` in sections
  of up to 10 M elements;
- the reduction itself, which rounds: ``predicted_error`` of :mod:`rankscope.stats.rounding`.

The record has no norm of a group's reduced gradient. It has the workers' norms ``a_i`` and the
cosine ``c_i`` of each gradient with the sum of all others, and from these follow a bound and an
estimate of ``s = |sum g_i|``:

    s >= a_i (c_i >= 0)  or  a_i sqrt(1 - c_i^2) (c_i < 0),    s^2 = sum_i (a_i^2 + c_i a_i r_i),

where ``r_i = |sum_{j != i} g_j|`` follows from s in turn.

Legend of shapes: W workers, G groups.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.stats.arrays import Floats
from rankscope.stats.rounding import UNIT_ROUNDOFF, Algorithm, predicted_error
from rankscope.stats.state import Stateful

SKETCH_FLOOR = 2.5e-6
"""Residual that sketches alone do not reach at ``kappa`` 1, twice the largest that was measured in
sections of 10 M elements (benchmarks/audit.py)."""

ROUNDINGS = 6.0
"""Times the predicted error; rounding stays below, in groups of few elements too."""

LASTING_ROUNDINGS = 2.5
"""Times the predicted error; rounding does not exceed it in step after step."""

ROUNDED = 1e-4
"""Least residual of a reported lasting error: half of float16's."""

NEAR = 1.5
"""Factor between a residual and a type's rounding error, up to which they fit."""

_OPPOSED = -0.3
"""Cosine below which the norm of the sum is the bound, not the estimate."""

_LOST = 4e-12
"""``1 - c^2`` of opposite gradients, after rounding."""

_ITERATIONS = 8
_SECTION_ROOT = math.sqrt(1e7)
_SMALLEST = {
    "float64": 2.0**-1022,
    "float32": 2.0**-126,
    "bfloat16": 2.0**-126,
    "float16": 2.0**-25,
}
"""Absolute error of an element that is too small for the type."""


def sums_of_gradients(norms_WG: Floats, cosine_rest_WG: Floats) -> Floats:
    """Estimate the norm of the sum of the workers' gradients, for each group ``[..., G]``.

    It is not above the truth where gradients oppose each other, but for the error of the cosines;
    NaN where no cosine with the others' sum ``[..., W, G]`` is known.
    """
    known_WG = np.isfinite(cosine_rest_WG) & (norms_WG > 0)
    some_G = np.logical_or.reduce(known_WG.reshape(-1, known_WG.shape[-1]))
    if not some_G.all():  # of many workers, the directions of a few groups are known in a step
        found_G = np.full((*known_WG.shape[:-2], len(some_G)), np.nan)
        if some_G.any():
            found_G[..., some_G] = sums_of_gradients(
                norms_WG[..., some_G], cosine_rest_WG[..., some_G]
            )
        return found_G
    norms = np.where(known_WG, norms_WG, 0.0)
    scale_G = norms.max(axis=-2, initial=0.0)
    with np.errstate(invalid="ignore"):  # an infinite norm gives NaN
        norms = norms / np.where(scale_G > 0, scale_G, 1.0)[..., None, :]
    cosines = np.clip(np.where(known_WG, cosine_rest_WG, 1.0), -1.0, 1.0)
    sines = np.sqrt(np.maximum(1.0 - np.square(cosines) - _LOST, 0.0))
    least_G = (norms * np.where(cosines >= 0, 1.0, sines)).max(axis=-2, initial=0.0)
    squares = np.square(norms)
    total_G = squares.sum(axis=-2)
    rests = np.sqrt(total_G[..., None, :] - squares)
    for _ in range(_ITERATIONS):
        dots = squares + cosines * norms * rests
        total_G = np.maximum(dots.sum(axis=-2), np.square(least_G))
        rests = np.sqrt(np.maximum(total_G[..., None, :] - 2 * dots + squares, 0.0))
    opposed_G = (np.where(known_WG, cosines, 1.0) < _OPPOSED).any(axis=-2)
    sums_G = scale_G * np.where(opposed_G, least_G, np.sqrt(total_G))
    return np.where(known_WG.any(axis=-2), sums_G, np.nan)


class ExpectedResiduals:
    """How large residuals may be, from the types in which groups are meant to be reduced.

    ``reduced_in``: name of that type by group; float32 where a group has none.
    """

    def __init__(self, num_workers: int, reduced_in: Mapping[str, str] | None) -> None:
        self._num_workers = num_workers
        self._meant = dict(reduced_in or {})
        types = {"float32", *self._meant.values()} & UNIT_ROUNDOFF.keys()
        self._most = {dtype: max(_errors(num_workers, dtype)) for dtype in types}

    def type_of(self, group: str) -> str:
        """Return the name of the type in which a group is meant to be reduced."""
        return self._meant.get(group, "float32")

    def limits(
        self, groups: tuple[str, ...], kappas_G: Floats, sums_G: Floats
    ) -> tuple[Floats, Floats]:
        """Return limits of the residuals of a single healthy step, and of many in a row ``[G]``.

        Infinite where a type, or the cancellation of gradients, is unknown.
        """
        types = [self.type_of(group) for group in groups]
        rounding_G = np.array([self._most.get(t, math.inf) for t in types])
        smallest_G = np.array([_SMALLEST.get(t, 0.0) for t in types])
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            rounding_G = rounding_G * np.maximum(kappas_G, 1.0)
            lost_G = self._num_workers**2 * _SECTION_ROOT * smallest_G / sums_G
            floor_G = SKETCH_FLOOR * np.sqrt((1 + np.square(kappas_G)) / 2) + lost_G
            once_G = floor_G + ROUNDINGS * rounding_G
            lasting_G = np.maximum(ROUNDED, floor_G + LASTING_ROUNDINGS * rounding_G)
        unknown_G = ~(np.isfinite(once_G) & np.isfinite(lasting_G))
        return np.where(unknown_G, np.inf, once_G), np.where(unknown_G, np.inf, lasting_G)

    def types_that_fit(self, residual: float, kappa: float, meant: str) -> tuple[str, ...]:
        """Return the names of 16-bit types, narrower than meant, that explain a residual."""
        squared = max(kappa, 1e-3) ** -2
        others = max(self._num_workers - 1, 1)
        cosine = min((squared - 1) / others, 1.0)
        fitting = []
        for dtype in ("bfloat16", "float16"):
            errors = _errors(self._num_workers, dtype, (cosine,))
            wider = UNIT_ROUNDOFF[dtype] > UNIT_ROUNDOFF.get(meant, 0.0)
            if wider and min(errors) / NEAR <= residual <= max(errors) * NEAR:
                fitting.append(dtype)
        return tuple(fitting)


def _errors(
    num_workers: int, dtype: str, cosines: tuple[float, ...] = (0.0, 1.0)
) -> tuple[float, ...]:
    """Return the errors that a type is predicted to give, of gradients or sums, in any order."""
    uses = (
        (dtype, None, None),
        (dtype, dtype, dtype),
        ("float32", dtype, None),
        ("float32", None, dtype),
    )
    return tuple(
        predicted_error(
            num_workers, sums=sums, inputs=inputs, result=result, algorithm=algorithm, cosine=cosine
        )
        for algorithm in Algorithm
        for cosine in cosines
        for sums, inputs, result in uses
    )


ELEMENT = "reduction-spike"
ONE_WORKER = "reduction-one-worker"
LOW_PRECISION = "numerics.reduction_error"
LOSSY = "reduction-lossy"
"""Keys of the kinds of errors, and of the rules that put them into words."""

STEPS = 16
"""Audited steps in a row after which an error is lasting; a usual level is that of so many, too."""

USUAL = 6.0
"""Times a group's usual residual, from which it is high where that is above rounding anyway."""

_KNOWN = 4  # steps whose cosines are known, before others are judged by them


@dataclass
class Streak(Stateful):
    """Steps in a row that share something."""

    since: int = 0
    last: int = 0
    steps: int = 0  # how many they are; 0: none
    worst: float = 0.0

    def extend(self, step: int, residual: float) -> None:
        """Add a step."""
        if not self.steps:
            self.since = step
            self.worst = 0.0
        self.steps += 1
        self.last = step
        self.worst = max(self.worst, residual)


@dataclass
class GroupHistory(Stateful):
    """A group's residuals so far; all are those of the workers' (lower) median."""

    usual: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    # cancellation of the gradients, in the last steps where it is known
    kappas: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    # the present high steps in a row that have not been reported
    high: Streak = field(default_factory=Streak)
    # the present steps in a row above the limit of many healthy steps
    lasting: Streak = field(default_factory=Streak)
    well: bool = False  # whether some step was not high
    sudden: bool = False  # whether the last step was reported as a single one
    residual: float = 0.0
    kappa: float = 1.0  # cancellation of the gradients then
    once: float = 0.0  # limit of a single healthy step then

    def kappa_of(self, now: float) -> float:
        """Return how much gradients cancel: in this step, else at most by their past, or NaN.

        ``now`` follows from the cosines of this step; NaN if they are unknown.
        """
        if not math.isnan(now):
            self.kappas.append(now)
            return now
        if len(self.kappas) < _KNOWN:
            return math.nan
        most = max(self.kappas)
        least = min(self.kappas)
        return most * (most / least) ** 2 if least > 0 else math.nan

    def limit(self, once: float) -> float:
        """Return the residual above which the group is high, if rounding explains ``once``."""
        return max(once, USUAL * statistics.median(self.usual)) if self.usual else once

    def add(
        self,
        step: int,
        residual: float,
        *,
        limit: float,
        once: float,
        lasting: float,
        common: float,
        at_once: bool,
    ) -> tuple[bool, Streak | None]:
        """Process a step's residual, that of the median worker.

        ``common``: usual residual of this step, if most groups err and did so before; else 0.
        ``at_once``: whether an exception may be reported in its own step.

        Returns whether this step is an exception, and the steps before if they were one. Of steps
        in a row, only the first is reported at once: the others may begin a lasting error.
        """
        high = residual > max(limit, common)
        exception = None
        if self.high.steps and residual <= once:
            exception = self.high if self.high.worst > common else None
            self.high = Streak()
            self.usual.clear()  # it held them
        sudden = high and at_once and self.well and not self.high.steps and not self.sudden
        if not sudden and (high or self.high.steps):
            self.high.extend(step, residual)
        if self.high.steps >= STEPS:
            self.high = Streak()
            self.well = True  # so it is always, or lasting
        if not sudden or self.sudden:
            self.usual.append(residual)
        if residual > lasting:
            self.lasting.extend(step, residual)
        else:
            self.lasting = Streak()
        self.sudden = sudden
        self.well = self.well or residual <= once
        self.residual = residual
        self.once = once
        return sudden, exception


@dataclass(frozen=True)
class ReductionFault(Stateful):
    """The evidence of one kind of error, over the whole run."""

    first: int
    last: int
    steps: int
    groups: tuple[str, ...]
    ranks: tuple[int, ...]
    residual: float
    limit: float
    fits: str = ""

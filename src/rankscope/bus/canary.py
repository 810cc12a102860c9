"""The verdict of a canary and swap test: data, code, state, hardware or non-determinism.

In a canary every worker runs the same two batches, forward and backward, with random generators
that are seeded alike: the batch of a suspect twice, that of a peer once. Healthy workers that hold
the same parameters must agree in every bit. So a difference that follows the batch to all workers
is in the data, one that stays with a worker is in its code, its state or its hardware, and a worker
that disagrees with itself computes at random.

Code comes before hardware: what the forward pass ran is compared exactly. Only where all of it is
known to agree is it the device.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.replicas import RUNNING_STATISTICS, StateDifference, StateKind, minority_ranks
from rankscope.bus.step import GatheredStep
from rankscope.bus.words import shortened
from rankscope.stats.arrays import MISSING_INT, Bools, Floats, Ints

ROUNDING = 1e-4
"""Relative difference of losses and gradient norms up to which rounding explains it, in 32 bits."""

SINGLE = 2.0**-24
"""Unit roundoff of 32 bits."""

_UNITS = 2.0
"""Unit roundoffs of the forward pass by which another kernel may move losses and gradient norms."""

_PROJECTED_UNITS = 8.0
"""The same for a projection, in which outputs of both signs cancel."""


class CanaryCause(StrEnum):
    """The cause that a canary proves."""

    DATA = "data"
    """All workers agree on both batches: in training, only their data differ."""
    CODE = "code"
    """Workers disagree that run other operations, or modules in another mode."""
    SETTINGS = "settings"
    """Workers disagree whose settings, versions or device differ."""
    STATE = "state"
    """Workers disagree whose parameters or buffers are known to differ."""
    HARDWARE = "hardware"
    """Workers disagree, and nothing of these is known to differ."""
    NONDETERMINISTIC = "nondeterministic"
    """A worker disagrees with itself."""
    INCONCLUSIVE = "inconclusive"
    """Results are missing, or there is no majority of workers."""


@dataclass(frozen=True, slots=True)
class CanaryResults:
    """Results of W workers on the same two batches."""

    suspect: int  # rank whose batch was run twice
    peer: int  # rank whose batch was run once
    losses_W: Floats  # of the suspect's batch, or projections of its outputs
    norms_W: Floats  # norm of its gradient
    digests_W: Ints  # of all bits of both; ``MISSING_INT`` without a result
    again_W: Ints  # the same of the second run
    peer_losses_W: Floats  # loss of the peer's batch
    peer_norms_W: Floats  # norm of its gradient
    peer_digests_W: Ints  # digest of all bits of both
    again_losses_W: Floats = field(default_factory=lambda: np.empty(0))  # empty where not recorded
    again_norms_W: Floats = field(default_factory=lambda: np.empty(0))  # likewise
    projected: bool = False  # the losses are projections of the outputs
    unit: float = SINGLE  # unit roundoff of the coarsest type in the forward pass

    @property
    def rounding(self) -> float:
        """Relative difference up to which rounding explains it."""
        return max(ROUNDING, self.unit * (_PROJECTED_UNITS if self.projected else _UNITS))

    @property
    def missing(self) -> tuple[int, ...]:
        """Workers without a result."""
        columns = np.stack([self.digests_W, self.again_W, self.peer_digests_W])
        return _ranks((columns == MISSING_INT).any(axis=0))

    @property
    def by_run(self) -> tuple[tuple[Floats, ...], tuple[Floats, ...]]:
        """Losses and gradient norms of the three runs."""
        losses = self.losses_W, self.again_losses_W, self.peer_losses_W
        norms = self.norms_W, self.again_norms_W, self.peer_norms_W
        return tuple(filter(len, losses)), tuple(filter(len, norms))


@dataclass(frozen=True, slots=True)
class CanaryVerdict:
    """The verdict of a canary, and the workers that it concerns."""

    verdict: CanaryCause
    ranks: tuple[int, ...]  # workers that differ, or lack a result; for data, the suspect
    distance: float  # largest relative one from the median; NaN when results are missing
    exact: bool = False  # all workers agree in every bit
    reasons: tuple[str, ...] = ()  # what sets these workers apart, in words, the most telling first
    hooks: tuple[str, ...] = ()  # of modules that set them apart, in words
    compared: bool = False  # it is known what all workers ran


def results_of(step: GatheredStep) -> CanaryResults | None:
    """Return the results of the canary that all workers ran in a step; None without one."""
    return results_in(step.workers)


def results_in(columns: Mapping[str, NDArray[Any]]) -> CanaryResults | None:
    """Return the same of a step's columns of workers."""
    of_W = columns["canary_of"]
    against_W = columns["canary_against"]
    ran = columns["canary_digest"] != MISSING_INT
    if not ran.all() or np.ptp(of_W) or np.ptp(against_W):
        return None
    return CanaryResults(
        suspect=int(of_W[0]),
        peer=int(against_W[0]),
        losses_W=columns["canary_loss"],
        norms_W=columns["canary_norm"],
        digests_W=columns["canary_digest"],
        again_W=columns["canary_again"],
        peer_losses_W=columns["canary_against_loss"],
        peer_norms_W=columns["canary_against_norm"],
        peer_digests_W=columns["canary_against_digest"],
        again_losses_W=columns["canary_again_loss"],
        again_norms_W=columns["canary_again_norm"],
        projected=bool(columns["canary_projected"].all()),
        unit=float(np.nan_to_num(columns.get("canary_unit", SINGLE), nan=SINGLE).max()),
    )


def differing_state(step: GatheredStep) -> tuple[int, ...]:
    """Return the workers whose parameters or buffers differ in a step from the others'.

    Running statistics do not count: a forward pass in training does not read them.
    """
    odd: set[int] = set()
    for difference in step.differences:
        counts = difference.name.rpartition(".")[2] not in RUNNING_STATISTICS
        if difference.kind in (StateKind.PARAMETER, StateKind.BUFFER) and counts:
            odd.update(difference.minority_ranks(step.workers["replica"]))
    return tuple(sorted(odd))


def judge_step(
    step: GatheredStep, results: CanaryResults, *, differing: tuple[int, ...] = ()
) -> CanaryVerdict:
    """Return the verdict of the canary of a step, with what its workers ran."""
    verdict = judge(results, differing=differing)
    compared = bool((step.workers["canary_program"] != MISSING_INT).all())
    return explain(verdict, step.differences) if compared else verdict


_EXPLAINED = frozenset(
    {
        CanaryCause.STATE,
        CanaryCause.HARDWARE,
        CanaryCause.INCONCLUSIVE,
        CanaryCause.NONDETERMINISTIC,
    }
)
_CAUSES = (
    ((StateKind.MODULE,), CanaryCause.CODE),
    ((StateKind.SETTING, StateKind.OPERATION), CanaryCause.SETTINGS),
    ((StateKind.OPERATION,), CanaryCause.CODE),
    ((StateKind.HELD,), CanaryCause.STATE),
    ((StateKind.SETTING,), CanaryCause.SETTINGS),
)
"""Kinds of facts that set workers apart, and the cause that they prove; the first one counts."""

_SHOWN = (StateKind.MODULE, StateKind.SETTING, StateKind.OPERATION, StateKind.HELD)


def explain(verdict: CanaryVerdict, differences: Iterable[StateDifference]) -> CanaryVerdict:
    """Return a verdict with its cause, given all that is known to set its workers apart."""
    words: dict[StateKind, list[str]] = {}
    for difference in differences:
        words.setdefault(difference.kind, []).append(difference.name)
    verdict = replace(verdict, compared=True, hooks=tuple(words.get(StateKind.HOOK, ())))
    if verdict.verdict not in _EXPLAINED or np.isnan(verdict.distance):
        return verdict
    for kinds, cause in _CAUSES:
        if all(kind in words for kind in kinds):
            reasons = [name for kind in _SHOWN for name in words.get(kind, ())]
            return replace(verdict, verdict=cause, reasons=tuple(reasons))
    return verdict


def judge(results: CanaryResults, *, differing: tuple[int, ...] = ()) -> CanaryVerdict:
    """Return the verdict of a canary from its results.

    Parameters or buffers of the workers ``differing`` are known to differ from the others'.
    """
    if results.missing:
        return CanaryVerdict(CanaryCause.INCONCLUSIVE, results.missing, np.nan)
    losses, norms = results.by_run
    distances_W = np.max([_relative(one.astype(np.float64)) for one in (*losses, *norms)], axis=0)
    distance = float(distances_W.max())
    keys_WD = np.stack([results.digests_W, results.peer_digests_W], axis=1)
    agreed = bool((keys_WD == keys_WD[0]).all())
    unsteady = results.digests_W != results.again_W
    if unsteady.all() and agreed and not np.ptp(results.again_W):
        # only the second run's backward pass had other random numbers
        return CanaryVerdict(CanaryCause.NONDETERMINISTIC, _ranks(unsteady), distance)
    if unsteady.any():
        return _judge_unsteady(results, distances_W, unsteady, differing)
    if agreed:
        return CanaryVerdict(CanaryCause.DATA, (results.suspect,), distance, exact=True)
    odd = minority_ranks(list(map(tuple, keys_WD.tolist())))
    return _blame(odd, len(odd) < len(keys_WD), distance, differing)


def _judge_unsteady(
    results: CanaryResults, distances_W: Floats, unsteady: Bools, differing: tuple[int, ...]
) -> CanaryVerdict:
    """Return the verdict where some workers do not repeat their own bits."""
    distance = float(distances_W.max())
    most = 2 * unsteady.sum() > len(unsteady)
    if not most or len(unsteady) == 1:  # alone, it may be rounding or chance
        return CanaryVerdict(CanaryCause.NONDETERMINISTIC, _ranks(unsteady), distance)
    if distance <= results.rounding:  # kernels that add in any order, as many do on accelerators
        return CanaryVerdict(CanaryCause.DATA, (results.suspect,), distance)
    far = ~(distances_W <= results.rounding)
    if 2 * far.sum() < len(far):
        return _blame(_ranks(far), True, distance, differing)
    return CanaryVerdict(CanaryCause.NONDETERMINISTIC, _ranks(unsteady), distance)


def _blame(
    odd: tuple[int, ...], settled: bool, distance: float, differing: tuple[int, ...]
) -> CanaryVerdict:
    """Return the verdict on workers that repeat themselves, and differ from the others."""
    if set(odd) & set(differing):
        ranks = odd if settled else tuple(sorted(set(odd) & set(differing)))
        return CanaryVerdict(CanaryCause.STATE, ranks, distance)
    verdict = CanaryCause.HARDWARE if settled else CanaryCause.INCONCLUSIVE
    return CanaryVerdict(verdict, odd, distance)


def _relative(values_W: Floats) -> Floats:
    """Return relative distances from the median; equal values, infinite ones too, are at 0."""
    finite = values_W[np.isfinite(values_W)]
    middle = float(np.median(finite)) if len(finite) else 0.0
    scale = max(abs(middle), np.finfo(np.float64).tiny)
    with np.errstate(invalid="ignore", over="ignore"):
        distances = np.abs(values_W - middle) / scale
    distances[~np.isfinite(values_W)] = 0.0 if not len(finite) else np.inf
    return distances


def _ranks(flags_W: Bools) -> tuple[int, ...]:
    return tuple(np.flatnonzero(flags_W).tolist())


def describe_size(results: CanaryResults, ranks: Sequence[int]) -> str:
    """Return how far the results of some workers are from the others', against rounding."""
    loss = "the projection of the outputs" if results.projected else "the loss"
    names = (loss, "the norm of the gradient")
    parts: list[str] = []
    largest = 0.0
    for name, runs in zip(names, results.by_run, strict=True):
        size, words = max(_apart(values_W, ranks) for values_W in runs)
        largest = max(largest, size)
        if size > results.rounding and not (parts and name == names[1]):
            parts.append(f"{name} is {words}")
    if not parts and not largest:
        return "in some of the gradient's elements; loss and norm are the same"
    if not parts:
        return f"by {largest:.1g} of loss or gradient, no more than rounding may"
    against = f"and rounding explains at most {_percent(results.rounding)}"
    if len(set(ranks)) == len(results.losses_W):
        return f"they differ by {_percent(largest)}, {against}"
    return f"{parts[0]}, {against}"


def _apart(values_W: Floats, ranks: Sequence[int]) -> tuple[float, str]:
    """Return the largest relative difference of some workers from the others, and its words."""
    others = [float(v) for rank, v in enumerate(values_W) if rank not in ranks and np.isfinite(v)]
    if not np.isfinite(values_W).any():
        return 0.0, ""
    middle = float(np.median(others or values_W))
    apart = [float(values_W[rank]) - middle for rank in ranks]
    worst = max(apart, key=lambda one: np.inf if np.isnan(one) else abs(one))
    if not np.isfinite(worst):
        finite = np.isfinite(middle)
        return (np.inf, f"not finite, the others' is {middle:.4g}") if finite else (0.0, "")
    size = abs(worst) / max(abs(middle), np.finfo(np.float64).tiny)
    direction = "lower" if worst * middle < 0 else "higher"
    return size, f"{_percent(size)} {direction}"


def _percent(share: float) -> str:
    if not np.isfinite(share):
        return "more than any number"
    if share >= 10:
        return f"{share:.1e} times its size"
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


_SAME = (
    "operations with their arguments, random numbers, parameters, settings and versions are the "
    "same on all workers"
)
_UNKNOWN = (
    "it is not known what each worker ran: dropout or evaluation mode, a mask, a branch on the "
    "rank, or a library come before the device"
)
_MOST_REASONS = 3


def why(
    verdict: CanaryCause,
    reasons: Sequence[str],
    hooks: Sequence[str],  # that set them apart
    *,
    compared: bool,  # it is known what all workers ran
) -> str:
    """Return why workers differ, as far as it is known: a sentence without its end."""
    if verdict is CanaryCause.STATE:
        named = f" ({name_reasons(reasons)})" if reasons else ""
        return f"parameters or buffers are known to differ{named}"
    if reasons:
        return f"what differs is {name_reasons(reasons)}"
    if not compared:
        return _UNKNOWN
    hooked = f"it is {name_reasons(hooks)}, or " if hooks else ""
    often = " now and then" if verdict is CanaryCause.NONDETERMINISTIC else ""
    return f"{_SAME}, so {hooked}the device computes differently{often}"


def name_reasons(reasons: Sequence[str]) -> str:
    """Return the first reasons, and how many others there are."""
    return shortened(reasons, _MOST_REASONS, "other difference", between="; ")

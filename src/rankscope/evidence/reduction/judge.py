"""The detectors of gradients that are not what they should be when the optimizer gets them.

That a reduction does not return the mean of the local gradients is seen in norms: the expected norm
of the reduced gradient follows from the workers' norms and cosines. A single step proves nothing, a
ratio that stays the same over many steps does.

For W gradients g_i with mean m:

    W^2 |m|^2  =  sum_i |g_i|^2  +  sum_{i != j} g_i . g_j

and the last sum is ``cosine_weighted * sum_{i != j} |g_i| |g_j|``. With cosines from sketches of
width k the norm of the mean is known to about ``sqrt(2/k)`` of it, 2 % for k = 4,093, as long as
the gradients do not oppose each other.

Gradients may also change between micro-batches, or after the reduction. The gradient at the end of
a backward pass is compared with that at the beginning of the next, on each worker
(:mod:`rankscope.wrappers.accumulator`), so a single difference is proof. A training may do it on
purpose once in a while: it is an error from the third step on, if the kind is one of the known
mistakes.

Legend of shapes: W workers, G groups.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from rankscope.bus.detector import (
    Check,
    CheckedRun,
    Detector,
    FaultEvidence,
    PersistentFault,
    RunFacts,
)
from rankscope.bus.finding import Severity
from rankscope.bus.messages import Derived
from rankscope.bus.replicas import ParametersByPlace, StateKind
from rankscope.bus.step import GatheredStep, reduced_norm
from rankscope.bus.steps import Step, common_scale
from rankscope.bus.words import count, named, shortened
from rankscope.evidence.reduction.audit import ReductionAudit
from rankscope.stats.arrays import Floats, how_far
from rankscope.stats.state import Stateful

CAUSE = "sync.accumulation"
LEFT_OVER = "gradient-left-over"
FILLED = "gradient-filled"
THROWN_AWAY = "gradients-thrown-away"
CHANGED_LATER = "sync.changed_later"

CHANGED = 1e-4
"""Relative change of a norm above which a gradient was changed: two readings differ by 1e-7."""

ERROR_FROM = 3
"""Steps of one kind from which it is an error."""

_FILLED_FROM = 8  # steps

_FEWEST_PASSES = 2
"""With so few passes, the first may have trained another model through this one, as in a GAN."""

_RESCALED = (
    " A pipeline schedule divides .grad by its micro-batches after each call, with what earlier "
    "calls have left: where several calls make an update, pass scale_grads=False and divide the "
    "loss."
)
_DROPPED = (
    " torch 2.13 itself sets .grad to None in the first call of each new pipeline schedule or "
    "stage: make those for all lengths before the training, and call each once."
)

_MOST_PASSES = 1024  # of an update

_SAME_FACTOR = 0.01
_STEADY = 1e-3  # in clipping by layer, three factors within 1 % are a coincidence that occurs
_NAMED = 4
_RESET = "reset"
_DOUBLED = "doubled"
_DIVIDED = "divided"
_MULTIPLIED = "multiplied"
_IN_PART = "changed in part"
_UNSTEADY = "changed"
_MISTAKES = (_RESET, _DOUBLED, _DIVIDED, _MULTIPLIED)
_OF_SCHEDULES = {_RESET: _DROPPED, _DIVIDED: _RESCALED}  # what torch's do themselves


class AccumulationAudit(Detector):
    """Gradients that change between micro-batches, or are left over from the step before.

    - Between the end of a micro-batch's backward pass and the beginning of the next, the
      accumulated gradient was reset, multiplied, or changed otherwise.
    - A step's backward pass added to a gradient that the optimizer had applied, and it applied the
      sum.
    - Losses were divided by the number of backward passes since the last update, and the gradients
      of all of these but the last had been taken away without one.
    - It added to other values that were there since the update before, and the optimizer applied
      the sum. Not where the optimizer lacks parameters: nothing need zero theirs.
    """

    SETTINGS = ("_holds_all",)

    def __init__(self, *, holds_all: bool = True) -> None:
        self._holds_all = holds_all
        self._changed = PersistentFault()
        self._last = _Change()
        self._in_schedule = False
        self._left_over = PersistentFault()
        self._filled = PersistentFault(_FILLED_FROM)
        self._thrown_away = PersistentFault(ERROR_FROM)
        self._scales: list[float] = []  # of the passes since the last update
        self._passes = 0  # of an update that had the last one alone
        self._updated = False  # whether all workers have updated in the step before

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report changed, left-over or filled gradients, and their end."""
        yield from self._see_changed(step.gathered)
        yield from self._see_left_over(step.gathered)
        yield from self._see_filled(step.gathered)
        yield from self._see_thrown_away(step.gathered)

    # Between micro-batches -----------------------------------------------------------------

    def _see_changed(self, gathered: GatheredStep) -> Iterable[FaultEvidence]:
        changes_W = gathered.workers["accumulator_change"]
        if not gathered.observed or np.isnan(changes_W).all():
            return
        ranks = np.flatnonzero(changes_W > CHANGED).tolist()
        if ranks:
            worst = int(np.nanargmax(changes_W))
            self._last.update(
                passes=int(np.nan_to_num(gathered.workers["micro_batches"][worst])),
                scale=float(gathered.workers["accumulator_scale"][worst]),
                micro=int(gathered.workers["accumulator_micro"][worst]),
                groups=_changed_groups(gathered, ranks),
            )
            self._in_schedule = bool(np.isfinite(gathered.workers["schedule_scale"]).any())
        if self._changed.observe(gathered.step, ranks):
            yield self._evidence()

    def _evidence(self) -> FaultEvidence:
        change = self._last
        seen = self._changed
        severity = Severity.WARNING
        if change.kind in _MISTAKES and seen.count >= ERROR_FROM:
            severity = Severity.ERROR
        if change.kind == _RESET and change.passes <= _FEWEST_PASSES:
            severity = Severity.NOTE
        numbers = {
            "steps": seen.count,
            "kind": change.kind,
            "factor": change.scale,
            "micro_batch": change.micro,
        }
        where = shortened(change.groups, _NAMED, "other group")
        fields = {
            "what": change.words,
            "where": f" of {where}" if where else "",
            "micro": f"{change.micro + 1:,}",
            "schedule": _OF_SCHEDULES.get(change.kind, "") if self._in_schedule else "",
        }
        evidence = seen.evidence(CAUSE, severity, seen.ranks, fields, numbers)
        return replace(evidence, groups=change.groups)

    # From step to step ---------------------------------------------------------------------

    def _see_left_over(self, gathered: GatheredStep) -> Iterable[FaultEvidence]:
        seen = self._left_over
        applied_W = gathered.workers["optimizer_steps"] > 0  # else it may be thrown away
        ranks = np.flatnonzero(gathered.workers["grad_left_over"] & applied_W).tolist()
        if applied_W.any() and seen.observe(gathered.step, ranks):
            severity = Severity.ERROR if seen.count >= ERROR_FROM else Severity.WARNING
            numbers = {"steps": seen.count, "kind": "left over"}
            yield seen.evidence(CAUSE, severity, seen.ranks, {}, numbers, key=LEFT_OVER)

    def _see_filled(self, gathered: GatheredStep) -> Iterable[FaultEvidence]:
        workers = gathered.workers
        updated_W = workers["optimizer_steps"] > 0
        follows, self._updated = self._updated, bool(updated_W.all())
        carried_W = workers["grad_carried_over"]
        if not (self._holds_all and follows and (gathered.observed or carried_W.any())):
            return
        explained_W = workers["grad_left_over"] | workers["grad_set_aside"]
        ranks = np.flatnonzero(carried_W & updated_W & ~explained_W).tolist()
        seen = self._filled
        if seen.observe(gathered.step, ranks):
            numbers = {"steps": seen.count, "kind": "filled"}
            yield seen.evidence(CAUSE, Severity.WARNING, seen.ranks, {}, numbers, key=FILLED)

    def _see_thrown_away(self, gathered: GatheredStep) -> Iterable[FaultEvidence]:
        """Judge the passes of an update; steps without one are those whose gradients are gone."""
        workers = gathered.workers
        updated_W = workers["optimizer_steps"] > 0
        single = bool((workers["micro_batches"] == 1).all())
        self._scales.append(common_scale(gathered) if single else math.nan)
        if not updated_W.all():
            if updated_W.any() or len(self._scales) > _MOST_PASSES:
                self._scales = [math.nan]
            return
        scales, self._scales = self._scales, []
        passes = len(scales) + max(0, int(workers["idle_passes"].max()))
        gone = passes > 1 and bool(workers["grad_set_aside"].all())
        divided = all(abs(scale * passes - 1) <= _STEADY for scale in scales)
        seen = self._thrown_away
        if gone and divided:
            self._passes = passes
        if seen.observe(gathered.step, range(len(updated_W)) if gone and divided else ()):
            numbers = {"steps": seen.count, "kind": "thrown away", "passes": self._passes}
            fields = {"passes": f"{self._passes:,}"}
            severity = Severity.NOTE if self._passes <= _FEWEST_PASSES else Severity.WARNING
            yield seen.evidence(CAUSE, severity, (), fields, numbers, key=THROWN_AWAY)


class ChangedLater(Detector):
    """Gradients of some parameters that change between the reduction and the optimizer.

    Clipping by norm and unscaling have one factor for all parameters of a step. Different factors
    are reported: as a note, since clipping by value or by layer does that, as does a layer that is
    held back, with 0. It is a warning where the factor is the same in three readings (to 0.1 %) or
    above 1. That proves nothing where the job has other ranks beside the workers: gradients may be
    summed over these. Where torch clips by value, smaller norms are that.
    """

    SETTINGS = ("_other_axes",)

    def __init__(self, *, other_axes: bool = False) -> None:
        self._other_axes = other_axes
        self._seen = PersistentFault()
        self._names: dict[str, bool] = {}
        self._factors: list[float] = []

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report changed gradients, and their end."""
        factors_W = step.gathered.workers["applied_odd"]
        known_W = np.isfinite(factors_W)
        if not known_W.any():
            return ()
        by_value_W = (factors_W < 1) & np.isfinite(step.gathered.workers["clip_value"])
        ranks = np.flatnonzero(known_W & (factors_W != 1) & ~by_value_W).tolist()
        if ranks:
            farthest = max(factors_W[ranks].tolist(), key=how_far)
            self._factors = [*self._factors, farthest][-ERROR_FROM:]
            found = [d.name for d in step.gathered.differences if d.kind is StateKind.CHANGED]
            self._names |= dict.fromkeys(found, True)
        return (self._evidence(),) if self._seen.observe(step.gathered.step, ranks) else ()

    def _evidence(self) -> FaultEvidence:
        seen = self._seen
        last = self._factors[-1]
        apart = max(self._factors) - min(self._factors)
        steady = len(self._factors) == ERROR_FROM and apart <= _STEADY * abs(last)
        above = last > 1 + _SAME_FACTOR and not self._other_axes
        serious = (steady and last != 0) or above
        names = list(self._names)
        of = f" (the farthest of {len(names)} gradients)" if len(names) > 1 else ""
        return seen.evidence(
            CHANGED_LATER,
            Severity.WARNING if serious else Severity.NOTE,
            seen.ranks,
            {"names": shortened(names, _NAMED), "factor": f"{last:.4g}", "of": of},
            {"steps": seen.count, **named(names), "factor": last},
        )


class _Change(Stateful):
    """The change of the accumulated gradient, as far as the steps agree.

    ``micro``: the micro-batch before which it happened, from 0. ``groups``: groups of parameters,
    where not all have changed. ``passes``: largest number of backward passes in a step.
    """

    def __init__(self) -> None:
        self.passes = 0
        self.kind = ""
        self.scale = 1.0
        self.micro = 0
        self.groups: tuple[str, ...] = ()

    def update(self, *, passes: int, scale: float, micro: int, groups: tuple[str, ...]) -> None:
        """Add a step's change."""
        self.passes = max(self.passes, passes, micro + 1)
        kind = _IN_PART if groups else _kind_of(scale)
        steady = abs(scale - self.scale) <= _SAME_FACTOR * max(abs(scale), abs(self.scale))
        if self.kind in ("", kind) and (steady or kind in (_RESET, _IN_PART) or not self.kind):
            self.kind = kind
        elif self.kind != _IN_PART:
            self.kind = _UNSTEADY
        self.scale = scale
        self.micro = micro
        self.groups = groups

    @property
    def words(self) -> str:
        """The change, in words."""
        if self.kind == _RESET:
            return "set to zero"
        if self.kind == _DOUBLED:
            return "doubled"
        if self.kind in (_DIVIDED, _MULTIPLIED):
            return f"{self.kind} (its norm is {self.scale:.4g} times what it was)"
        return f"changed (its norm is {self.scale:.4g} times what it was)"


def _kind_of(scale: float) -> str:
    if scale <= CHANGED:
        return _RESET
    if abs(scale - 2) <= 2 * _SAME_FACTOR:
        return _DOUBLED
    return _DIVIDED if scale < 1 else _MULTIPLIED


def _changed_groups(gathered: GatheredStep, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the groups whose gradient has changed on these workers; empty if those of all have."""
    changes_WG = gathered.accumulator_changes_WG
    norms_WG = gathered.group_norms_WG
    if changes_WG is None or norms_WG is None:
        return ()
    changed_G = np.asarray((changes_WG[ranks] > CHANGED).any(0))
    empty_WG = np.isnan(changes_WG[ranks]) | (norms_WG[ranks] == 0)  # without a shard, say
    if (changed_G | empty_WG.all(0)).all():
        return ()
    return tuple(name for name, changed in zip(gathered.groups, changed_G, strict=True) if changed)


LEAST_SHARE = 0.25
"""Of ``sum |g_i|^2``: where ``W^2 |m|^2`` is smaller, gradients oppose each other too much."""


def norm_of_mean(norms_W: Floats, cosine_weighted: float) -> float:
    """Return the norm of the mean of W gradients.

    ``cosine_weighted``: their mean cosine, weighted by the products of norms. Returns NaN where the
    norm cannot be found.
    """
    if len(norms_W) < 2 or not math.isfinite(cosine_weighted):
        return float("nan")
    scale = float(norms_W.max())
    if not 0 < scale < math.inf or norms_W.min() < 0:
        return float("nan")
    scaled_W = norms_W / scale
    squares = float((scaled_W * scaled_W).sum())
    products = float(scaled_W.sum()) ** 2 - squares
    total = squares + cosine_weighted * products
    if total < LEAST_SHARE * squares:
        return float("nan")
    return scale * math.sqrt(total) / len(norms_W)


def clip_limit(reduced_norm: float, cosine_mean: float, num_workers: int) -> float:
    """Return the length that all W gradients had when they were reduced, if all had the same.

    Unit vectors with mean cosine c have a mean of norm ``sqrt((1 + (W - 1) c) / W)``. Returns NaN
    where the length cannot be found.
    """
    share = (1 + (num_workers - 1) * cosine_mean) / num_workers
    if not math.isfinite(share) or share * num_workers < LEAST_SHARE:
        return float("nan")
    return reduced_norm / math.sqrt(share)


STEPS = 16
"""Observed steps that must agree."""

STEPS_APPLIED = STEPS // 2
"""Steps that must agree on a factor after the reduction, which is measured, not estimated."""

APART = 0.2
"""Relative distance of the reduced from the expected norm, from which it is wrong."""

STEADY = 0.04
"""Relative spread of a ratio that stays the same: twice what sketches leave."""

_LOW = 0.97
_HIGH = 1.03  # inside exp(±STEADY): no test of a ratio's logarithm begins there
_EXACT = 2e-3
_PINNED = 1e-4


class ReductionChecks(Detector):
    """Wrong scale, stale results, and gradients clipped before the reduction.

    Not of a loop (``by_loop``) in which ranks hold other parameters by their place in groups: it
    reduces these over some of the workers.
    """

    SETTINGS = ("_num_workers", "_by_loop")

    def __init__(self, num_workers: int, *, by_loop: bool = False, trained: int = 0) -> None:
        self._num_workers = num_workers
        self._by_loop = by_loop
        self._placed = ParametersByPlace(trained)
        self._history: deque[tuple[float, ...]] = deque(maxlen=STEPS)
        self._applied: deque[float] = deque(maxlen=STEPS_APPLIED)
        self._pinned: deque[float] = deque(maxlen=STEPS)
        self._found: dict[str, PersistentFault] = {}

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report a fault when enough steps agree on it."""
        if self._num_workers < 2:
            return ()
        gathered = step.gathered
        if self._by_loop:
            self._placed.observe(gathered.differences)
            if self._placed.names:
                return ()
        found = [self._check_applied(gathered)]
        if gathered.observed:
            norms_W = gathered.workers["grad_norm"].astype(np.float64)
            self._history.append(self._summary(step, norms_W))
            found += [self._check_ratio(gathered.step), self._check_pinned(gathered.step, norms_W)]
        return [evidence for evidence in found if evidence is not None]

    def _summary(self, step: Step, norms_W: Floats) -> tuple[float, ...]:
        """Return the reduced and the expected norm, and the limit if all were clipped."""
        values = step.report.values
        reduced = float(values.get("grad_norm_reduced", math.nan))
        margin = CHANGED * float(norms_W.max())
        apart_W = np.abs(step.gathered.workers["reduced_norm"] - norms_W)
        if np.ptp(norms_W) > margin and (apart_W <= margin).all():
            reduced = math.nan  # nobody has reduced: the norms are each worker's own
        weighted = float(values.get("cosine_weighted", math.nan))
        mean = float(values.get("cosine_mean", math.nan))
        return (
            reduced,
            norm_of_mean(norms_W, weighted),
            clip_limit(reduced, mean, self._num_workers),
        )

    def _check_applied(self, gathered: GatheredStep) -> FaultEvidence | None:
        """Find gradients that are divided, or multiplied, by W once more after the reduction."""
        clipped_W = gathered.workers["clip_factor"]  # by calls that are known
        clipped_W = np.where(np.isfinite(clipped_W), clipped_W, 1.0)
        scales_W = gathered.workers["applied_scale"] / clipped_W
        width = self._num_workers
        first = float(scales_W[0])
        spread = float(scales_W.max()) - float(scales_W.min())
        common = spread <= _EXACT * abs(first) < math.inf  # false with NaN, or an infinity
        self._applied.append(first if common and not _undoes_scale(gathered, first) else math.nan)
        if len(self._applied) < STEPS_APPLIED:
            return None
        for factor, words in ((1 / width, "divided"), (width, "multiplied")):
            if all(abs(scale / factor - 1) < _EXACT for scale in self._applied):
                return self._evidence(
                    "sync.wrong_scale",
                    gathered.step,
                    factor=float(factor),
                    what=f"{words} once more by the number of workers",
                    window=STEPS_APPLIED,
                )
        return None

    def _check_ratio(self, step: int) -> FaultEvidence | None:
        if len(self._history) < STEPS or all(
            _LOW * expected <= reduced <= _HIGH * expected for reduced, expected, _ in self._history
        ):  # so close to 1 that nothing can be wrong
            return None
        history = np.array(self._history)
        usable = np.isfinite(history[:, :2]).all() and (history[:, :2] > 0).all()
        if not usable:
            return None
        reduced, expected, limits = history.T
        logs = np.log(reduced / expected)
        off = float(np.median(logs))
        spread = float(np.std(logs))
        wrong = abs(off) > APART and spread < STEADY
        factor = float(np.exp(off))
        what = self._reading(factor) if wrong else ""
        if what:
            return self._evidence("sync.wrong_scale", step, factor=factor, what=what)
        late, now = (
            float(np.sqrt(np.mean(np.square(one))))
            for one in (np.log(reduced[1:] / expected[:-1]), logs)
        )
        if late < STEADY and now > 3 * max(late, STEADY / 2):
            return self._evidence("sync.stale", step)
        if not np.isfinite(limits).all():
            return None
        # Norms that change from step to step separate a limit from a factor: one explanation holds.
        limited = float(np.std(np.log(limits)))
        if off < -STEADY and limited < min(STEADY, spread / 2):
            return self._evidence("sync.clipped_locally", step, limit=float(np.median(limits)))
        if wrong and spread < limited / 2:
            return self._evidence("sync.wrong_scale", step, factor=factor, what="scaled")
        return None

    def _check_pinned(self, step: int, norms_W: Floats) -> FaultEvidence | None:
        """Find local norms that stop at one value: most workers', in most steps."""
        largest = float(norms_W.max())
        pinned = False
        if 0 < largest < math.inf:
            at_limit = np.abs(norms_W - largest) <= _PINNED * largest
            pinned = 2 * int(np.count_nonzero(at_limit)) > len(norms_W)
        self._pinned.append(largest if pinned else math.nan)
        limits = [limit for limit in self._pinned if math.isfinite(limit)]
        if len(limits) < 3 * STEPS // 4 or max(limits) - min(limits) > _PINNED * limits[0]:
            return None
        if self._history[-1][1] > (1 - STEADY) * limits[0]:
            return None  # equal directions, too: the workers train on the same batches
        return self._evidence("sync.clipped_locally", step, limit=limits[0])

    def _reading(self, factor: float) -> str:
        """Return the usual mistake that gives a factor; empty if none does."""
        width = self._num_workers
        readings = {
            1 / width: "divided twice by the number of workers",
            float(width): "summed, not averaged",
        }
        for expected, words in readings.items():
            if abs(np.log(factor / expected)) < STEADY:
                return words
        return ""

    def _evidence(
        self,
        cause: str,
        step: int,
        *,
        factor: float = 1.0,
        what: str = "",
        limit: float = 0.0,
        window: int = STEPS,
    ) -> FaultEvidence:
        found = self._found.setdefault(cause, PersistentFault())
        found.see(
            step, range(self._num_workers), first=max(step - window + 1, 0), before=window - 1
        )
        fields = {
            "factor": f"{factor:.3g}",
            "what": what,
            "limit": f"{limit:.3g}",
            "steps": count(found.count, "observed step"),
        }
        numbers = {"factor": factor, "limit": limit, "steps": found.count}
        error = cause != "sync.clipped_locally"
        severity = Severity.ERROR if error else Severity.WARNING
        return found.evidence(cause, severity, found.ranks, fields, numbers, key=cause)


def _undoes_scale(gathered: GatheredStep, applied: float) -> bool:
    """Return whether a factor after the reduction brings the loss's multiplier nearer to 1.

    So does a gradient scaler's ``unscale_``, and code that sums losses over micro-batches.
    """
    scale = common_scale(gathered)
    if math.isnan(scale):
        scale = float(gathered.workers["micro_batches"].min())  # negative where it is not known
    if not (scale > 0 and 0 < applied < math.inf):  # false with NaN
        return False
    return abs(math.log(scale) + math.log(applied)) < abs(math.log(scale))


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (
        ReductionChecks(run.num_workers, by_loop=run.by_loop, trained=run.trained),
        ReductionAudit(
            run.num_workers,
            run.reduced_in,
            hook=run.comm_hook,
            by_loop=run.by_loop,
            trained=run.trained,
        ),
        AccumulationAudit(holds_all=run.by_loop or not run.unheld),
        ChangedLater(other_axes=run.world_size > run.num_workers),
    )


def make_checks(run: CheckedRun) -> tuple[Check, ...]:
    """Return the checks of a run."""
    impossible = ""
    if run.options.get("tier") == "scalars":
        impossible = "tier='scalars'"
    if run.options.get("reduced", "sketch") != "sketch":
        impossible = "no sketch of the reduction"
    return (Check("faults of the reduction", STEPS, impossible),)


def derive(gathered: GatheredStep) -> Derived:
    """Return the norm of the reduced gradient, and its distance from the workers' mean."""
    residuals_W = gathered.total_residuals_W
    known_W = np.empty(0) if residuals_W is None else residuals_W[np.isfinite(residuals_W)]
    return Derived(
        {
            "grad_norm_reduced": reduced_norm(gathered),
            "reduction_residual": float(known_W.max()) if known_W.size else math.nan,
        }
    )

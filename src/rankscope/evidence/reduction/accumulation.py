"""The detectors of gradients that change between micro-batches, or after the reduction.

The gradient at the end of a backward pass is compared with that at the beginning of the next, on
each worker (:mod:`rankscope.wrappers.accumulator`), so a single difference is proof. A training may
do it on purpose once in a while: it is an error from the third step on, if the kind is one of the
known mistakes.

Legend of shapes: W workers, G groups.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence
from rankscope.bus.finding import Severity
from rankscope.bus.persistent_fault import PersistentFault
from rankscope.bus.replicas import StateKind
from rankscope.bus.step import GatheredStep
from rankscope.bus.steps import Step
from rankscope.bus.words import named, shortened
from rankscope.stats.state import Stateful

CAUSE = "sync.accumulation"
LEFT_OVER = "gradient-left-over"
CHANGED_LATER = "sync.changed_later"

CHANGED = 1e-4
"""Relative change of a norm above which a gradient was changed: two readings differ by 1e-7."""

ERROR_FROM = 3
"""Steps of one kind from which it is an error."""

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
    """

    def __init__(self) -> None:
        self._changed = PersistentFault()
        self._last = _Change()
        self._in_schedule = False
        self._left_over = PersistentFault()

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report changed or left-over gradients, and their end."""
        found = []
        if self._follow(step.gathered):
            found.append(self._evidence())
        if self._follow_left_over(step):
            found.append(self._left_over_evidence())
        return found

    # Between micro-batches -----------------------------------------------------------------

    def _follow(self, gathered: GatheredStep) -> bool:
        changes_W = gathered.workers["accumulator_change"]
        if not gathered.observed or np.isnan(changes_W).all():
            return False
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
        return self._changed.observe(gathered.step, ranks)

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
            "over": "" if seen.open else " It is over now.",
            "schedule": _OF_SCHEDULES.get(change.kind, "") if self._in_schedule else "",
        }
        evidence = seen.evidence(CAUSE, severity, seen.ranks, fields, numbers)
        return replace(evidence, groups=change.groups)

    # From step to step ---------------------------------------------------------------------

    def _follow_left_over(self, step: Step) -> bool:
        workers = step.gathered.workers
        applied_W = workers["optimizer_steps"] > 0  # else it may be thrown away
        if not applied_W.any():
            return False
        ranks = np.flatnonzero(workers["grad_left_over"] & applied_W).tolist()
        return self._left_over.observe(step.gathered.step, ranks)

    def _left_over_evidence(self) -> FaultEvidence:
        seen = self._left_over
        severity = Severity.ERROR if seen.count >= ERROR_FROM else Severity.WARNING
        over = "" if seen.open else " It is over now."
        numbers = {"steps": seen.count, "kind": "left over"}
        return seen.evidence(CAUSE, severity, seen.ranks, {"over": over}, numbers, key=LEFT_OVER)


class ChangedLater(Detector):
    """Gradients of some parameters that change between the reduction and the optimizer.

    Clipping by norm and unscaling have one factor for all parameters of a step. Different factors
    are reported: as a note, since clipping by value or by layer does that, and as a warning where
    the factor is the same in three readings (to 0.1 %), above 1, or 0. Above 1 proves nothing where
    the job has other ranks beside the workers: gradients may be summed over these.
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
        ranks = np.flatnonzero(known_W & (factors_W != 1)).tolist()
        if ranks:
            self._factors = [*self._factors, float(factors_W[ranks[0]])][-ERROR_FROM:]
            found = [d.name for d in step.gathered.differences if d.kind is StateKind.CHANGED]
            self._names |= dict.fromkeys(found, True)
        return (self._evidence(),) if self._seen.observe(step.gathered.step, ranks) else ()

    def _evidence(self) -> FaultEvidence:
        seen = self._seen
        last = self._factors[-1]
        apart = max(self._factors) - min(self._factors)
        steady = len(self._factors) == ERROR_FROM and apart <= _STEADY * abs(last)
        above = last > 1 + _SAME_FACTOR and not self._other_axes
        serious = steady or above or last == 0
        names = list(self._names)
        return seen.evidence(
            CHANGED_LATER,
            Severity.WARNING if serious else Severity.NOTE,
            seen.ranks,
            {
                "names": shortened(names, _NAMED),
                "factor": f"{last:.4g}",
                "over": "" if seen.open else " It is over now.",
            },
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
    """Return the groups whose gradient has changed on these workers; empty if those of all have.

    Of a small group, a worker may hold no shard.
    """
    changes_WG = gathered.accumulator_changes_WG
    norms_WG = gathered.group_norms_WG
    if changes_WG is None or norms_WG is None:
        return ()
    changed_G = np.asarray((changes_WG[ranks] > CHANGED).any(0))
    empty_WG = np.isnan(changes_WG[ranks]) | (norms_WG[ranks] == 0)
    if (changed_G | empty_WG.all(0)).all():
        return ()
    return tuple(name for name, changed in zip(gathered.groups, changed_G, strict=True) if changed)

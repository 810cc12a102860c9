"""The detectors of state: digests that should agree, parameters that never change or move twice.

The differences come from :mod:`rankscope.evidence.state.roles`.
"""

from collections.abc import Iterable

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
from rankscope.bus.replicas import StateKind
from rankscope.bus.steps import Step
from rankscope.bus.words import count, named, shortened
from rankscope.evidence.state.roles import Role
from rankscope.evidence.state.unequal import UnequalState

STATE_STEPS = 64
"""Steps of one cycle through parameters, buffers and optimizer state."""


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    plan = run.plan
    return (
        UnequalState(
            run.num_workers,
            local_buffers=plan.local_buffers,
            local_steps=plan.local_steps or 0,
            replicated=plan.replicated,
            by_loop=run.by_loop,
            unsaved=run.unsaved_buffers,
        ),
        NotUpdated(),
        MovesInPasses(),
    )


def make_checks(run: CheckedRun) -> tuple[Check, ...]:
    """Return the checks of a run."""
    impossible = "" if run.options.get("evidence", True) else "evidence=False"
    return (Check("parameters, buffers and optimizer state", STATE_STEPS, impossible),)


ALONE = "state.not_updated"
HELD = "not-updated-though-held"
NOTHING = "nothing-updated"
TWICE = "state.updated_twice"
REPLACED = "state.other_tensors_held"

_NAMED = 4
_MOVES = 2  # in a step
_STEPS = 3

FROZEN_MOVES = "state.moves_in_forward"
OTHERS_MOVE = "others-move-in-forward"


class NotUpdated(Detector):
    """Parameters that have a gradient and keep their bits, while the optimizer changes others.

    A warning where the optimizer that ``watch`` knows does not hold them; a note where it does: a
    learning rate of 0, or an update that rounding loses, explains it. A warning where no parameter
    changes at all, and for parameters that the optimizer holds more than once. An error where it
    holds other tensors of their shapes instead, which never have a gradient.
    """

    def __init__(self) -> None:
        self._names: dict[str, dict[str, bool]] = {}  # whether the fault is open, by key and name
        self._spans: dict[str, PersistentFault] = {}

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report parameters that stop changing, change again, or are held twice."""
        changed: dict[str, None] = {}
        for found in step.gathered.differences:
            if found.kind is StateKind.RESTING:
                is_open = bool(found.unchanged_W[0])
                keys: tuple[str, ...] = (ALONE, HELD, NOTHING)
                if is_open:  # when it changes again, the optimizer may hold it by now
                    keys = (_key_of(int(found.digests_W[0])),)
            elif found.kind is StateKind.ROLE and np.all(found.digests_W & Role.TWICE):
                is_open = True
                keys = (TWICE,)
            else:
                continue
            for key in keys:
                if self._update(key, found.name, step.gathered.step, is_open=is_open):
                    changed[key] = None
        return [self._evidence(key) for key in changed]

    def _update(self, key: str, name: str, step: int, *, is_open: bool) -> bool:
        """Note one parameter's fault; return whether the finding changes."""
        names = self._names.setdefault(key, {})
        if name not in names and not is_open:
            return False
        names[name] = is_open
        if is_open:
            span = self._spans.setdefault(key, PersistentFault())
            if span.last != step:
                span.see(step)
        self._spans[key].open = any(names.values())
        return True

    def _evidence(self, key: str) -> FaultEvidence:
        still = [name for name, is_open in self._names[key].items() if is_open]
        names = still or list(self._names[key])
        span = self._spans[key]
        over = "" if span.open else " They change again."
        fields = {"names": shortened(names, _NAMED), "over": over}
        cause = key if key in (TWICE, REPLACED) else ALONE
        severity = _SEVERITIES.get(key, Severity.WARNING)
        return span.evidence(cause, severity, (), fields, named(names), key=key)


_SEVERITIES = {HELD: Severity.NOTE, REPLACED: Severity.ERROR}


def _key_of(word: int) -> str:
    if word & Role.REPLACED:
        return REPLACED
    if word & Role.ALL_REST:
        return NOTHING
    return HELD if word & Role.OWNED else ALONE


class MovesInPasses(Detector):
    """State that changes twice or more in a step, between its forward passes.

    A warning for frozen parameters, which an average of the weights may move, once a step. A note
    for others: a training may keep them normalised; buffers may be statistics of its own.
    """

    def __init__(self) -> None:
        self._names: dict[str, dict[str, bool]] = {}
        self._most: dict[str, int] = {}
        self._spans: dict[str, PersistentFault] = {}

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report what moved in it."""
        found: dict[str, dict[str, int]] = {}
        for one in step.gathered.differences:
            most = int(one.digests_W.max())
            if one.kind is StateKind.PASSES and most >= _MOVES:
                key = FROZEN_MOVES if one.unchanged_W.any() else OTHERS_MOVE
                found.setdefault(key, {})[one.name] = most
        number = step.gathered.step
        for key, moved in found.items():
            self._names.setdefault(key, {}).update(dict.fromkeys(moved, True))
            self._most[key] = max(self._most.get(key, 0), *moved.values())
            self._spans.setdefault(key, PersistentFault(_STEPS)).observe(number, [0])
        return [self._evidence(key) for key in found if self._spans[key].open]

    def _evidence(self, key: str) -> FaultEvidence:
        names = list(self._names[key])
        fields = {"names": shortened(names, _NAMED), "times": count(self._most[key], "time")}
        numbers = {**named(names), "changes": self._most[key]}
        severity = Severity.WARNING if key == FROZEN_MOVES else Severity.NOTE
        span = self._spans[key]
        return span.evidence(FROZEN_MOVES, severity, (), fields, numbers, key=key)

"""The detectors of environments: versions, precision, modes of modules."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence, PersistentFault, RunFacts
from rankscope.bus.environment import DECIDES_BITS, HARMLESS, PACKAGES, is_compared
from rankscope.bus.finding import Severity
from rankscope.bus.replicas import StateKind, known_values, minority_ranks, name_values
from rankscope.bus.step import MISSING_INT
from rankscope.bus.steps import Step
from rankscope.bus.words import count, name_ranks
from rankscope.evidence.environment.settings import (
    DifferentSettings,
    PlannedSeed,
    ScheduleByPass,
    ScheduleEnded,
    ScheduleJump,
)

CAUSE = "env.mismatch"
MODES = "compute.modes_differ"
DROPOUT = "dropout-off"
_READINGS = 2

STEPS_IN_A_ROW = 3
"""Steps in which a worker computes in another precision before it is reported."""

_TITLES = {"revision": "source revision", "revision_changed": "source files"}
_MOST_LISTED = 6


class EnvironmentMismatch(Detector):
    """Workers whose versions, device, flags, vocabulary or source differ, or their precision.

    The facts of the ranks at their start are compared once, and reported with the first step. The
    precision of the forward pass is compared in every step.

    ``facts``: each rank's environment by name, in rank order; empty when unknown. Names in capital
    letters are environment variables.
    """

    SETTINGS = ("_words", "_minority", "_severity", "_at_start")

    def __init__(self, facts: Sequence[Mapping[str, Any]] = ()) -> None:
        self._minority, self._words, self._severity = compare_facts(facts)
        self._at_start = True
        self._first = self._last = -1
        self._ranks: set[int] = set()
        self._differed = self._serious = False
        self._precision = PersistentFault(STEPS_IN_A_ROW, in_a_row=True)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report with the first one, and while the precision differs."""
        number = step.gathered.step
        changed = self._at_start and self._start(number)
        if step.alike("precision"):
            if step.gathered.num_workers > 1 and step.some_known("precision"):
                changed |= self._precision.observe(number, ())
            return (self._evidence(),) if changed else ()
        codes_W = step.gathered.workers["precision"]
        known_W = codes_W != MISSING_INT
        if np.count_nonzero(known_W) > 1:
            minority = minority_ranks(known_values(codes_W, known_W))
            changed |= self._precision.observe(number, minority)
        return (self._evidence(),) if changed else ()

    def _start(self, step: int) -> bool:
        """Begin or continue a run; return whether the evidence has changed."""
        self._at_start = False
        changed = self._differed or bool(self._minority)
        self._differed = bool(self._minority)
        if self._minority:
            self._ranks = set(self._minority)
            self._serious = self._severity is Severity.WARNING
            self._first = step if self._first < 0 else self._first
            self._last = step
        return changed

    def _evidence(self) -> FaultEvidence:
        seen = self._precision
        words = list(self._words[:_MOST_LISTED])
        ranks = self._ranks | seen.ranks
        more = len(self._words) - len(words)
        if more:
            words.append(f"and {count(more, 'other difference')}")
        if seen.count:
            until = "" if seen.open else f" until step {seen.last:,}"
            who = name_ranks(seen.ranks)
            words.insert(0, f"another precision in the forward pass of {who}{until}")
        steps = [number for number in (self._first, seen.first) if number >= 0]
        return FaultEvidence(
            cause=CAUSE,
            severity=Severity.WARNING if self._serious or seen.count else Severity.NOTE,
            ranks=tuple(sorted(ranks)),
            first_step=min(steps, default=0),
            last_step=max(self._last, seen.last, 0),
            count=max(1, seen.count),
            fields={
                "what": "; ".join(words) or "no difference any more",
            },
            numbers={"differences": words, "steps_in_another_precision": seen.count},
            status="open" if self._minority or seen.open else "closed",
        )


class DifferentModes(Detector):
    """Modules in training mode on some workers, and in evaluation mode on others."""

    def __init__(self) -> None:
        self._modes = PersistentFault()
        self._what: tuple[str, ...] = ()

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report different modes, and their end."""
        gathered = step.gathered
        if not step.all_known("modes"):
            return ()
        found = [d for d in gathered.differences if d.kind is StateKind.MODE]
        ranks = {r for d in found for r in minority_ranks(d.digests_W.tolist())}
        self._what = tuple(d.name for d in found) or self._what
        seen = self._modes
        if not seen.observe(gathered.step, ranks):
            return ()
        what = "; ".join(self._what[:_MOST_LISTED])
        more = len(self._what) - _MOST_LISTED
        what += f"; and {count(more, 'other difference')}" if more > 0 else ""
        numbers = {"steps": seen.count, "modules": list(self._what)}
        fields = {"what": what}
        return (seen.evidence(MODES, Severity.WARNING, seen.ranks, fields, numbers),)


class DropoutOff(Detector):
    """Dropout layers that are all in evaluation mode, on all workers, while the model trains."""

    def __init__(self) -> None:
        self._span = PersistentFault(_READINGS)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step in which modes were read; report dropout that is off, and its end."""
        if not step.all_known("dropout_off"):
            return ()
        off_W = step.gathered.workers["dropout_off"] == 1
        ranks = range(len(off_W)) if off_W.all() else ()
        span = self._span
        if not span.observe(step.gathered.step, ranks):
            return ()
        over = "" if span.open else " It is on again."
        numbers = {"readings": span.count}
        return (span.evidence(MODES, Severity.NOTE, (), {"over": over}, numbers, key=DROPOUT),)


def compare_facts(
    facts: Sequence[Mapping[str, Any]],
) -> tuple[tuple[int, ...], tuple[str, ...], Severity]:
    """Return the ranks that differ, each difference in words, the serious first, and the severity.

    ``facts`` are in rank order; an empty one is unknown.
    """
    names = sorted(filter(is_compared, {name for own in facts for name in own}))
    serious: list[str] = []
    harmless: list[str] = []
    ranks: set[int] = set()
    for name in names:
        values = [_value(own, name) for own in facts]
        minority = minority_ranks(values)
        if not minority:
            continue
        ranks.update(minority)
        note = name in HARMLESS or (name.isupper() and name not in DECIDES_BITS)
        (harmless if note else serious).append(_difference(name, values, minority))
    severity = Severity.WARNING if serious else Severity.NOTE
    return tuple(sorted(ranks)), (*serious, *harmless), severity


def _value(facts: Mapping[str, Any], name: str) -> str | int | bool | None:
    """Return a fact; None where it is unknown, so that it is not compared."""
    if not facts:
        return None
    value = facts.get(name)
    if isinstance(value, str | int):
        return value
    if name.isupper():
        return "not set"
    return "not installed" if name in PACKAGES else None


def _difference(name: str, values: Sequence[str | int | bool | None], odd: Sequence[int]) -> str:
    if name == "vocabulary":
        return f"another vocabulary on {name_ranks(odd)}"
    words = [None if value is None else _word(name, value) for value in values]
    title = _TITLES.get(name, name.replace("_", " ") if name.islower() else name)
    return f"{title} {name_values(words)}"


def _word(name: str, value: str | int | bool) -> str:
    if name == "revision_changed":
        return "changed since the commit" if value else "unchanged"
    if name == "revision":
        return str(value)[:10]
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (
        EnvironmentMismatch(run.environments),
        DifferentModes(),
        DropoutOff(),
        DifferentSettings(run.num_workers, run.plan),
        ScheduleByPass(),
        ScheduleEnded(),
        ScheduleJump(),
        PlannedSeed(run.plan.seed, run.sampler_seeds),
    )

"""Environments compared: versions, precision, modes of modules, settings of the optimizer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rankscope.bus.detector import (
    Detector,
    FaultEvidence,
    PersistentFault,
    RunFacts,
    evidence_at,
)
from rankscope.bus.environment import compare_facts, compare_settings
from rankscope.bus.finding import Severity
from rankscope.bus.messages import Columns, Combiner, Layout, Messages
from rankscope.bus.replicas import (
    StateDifference,
    StateKind,
    known_values,
    minority_ranks,
    name_values,
)
from rankscope.bus.steps import Step
from rankscope.bus.words import count, name_modules, name_ranks
from rankscope.evidence.environment import MODES, PRECISION, SETTINGS
from rankscope.evidence.environment.settings import (
    DifferentSettings,
    PlannedSeed,
    ScheduleByPass,
    ScheduleEnded,
    ScheduleJump,
)
from rankscope.stats.arrays import MISSING_INT, Ints

CAUSE = "env.mismatch"
CONFIGURED = "configured-differently"
MODES_DIFFER = "compute.modes_differ"
DROPOUT = "dropout-off"
EVALUATES = "evaluation-mode"
_READINGS = 2

STEPS_IN_A_ROW = 3
"""Steps in which a worker computes in another precision before it is reported."""

_MOST_LISTED = 6
_MOST_PRECISIONS = 64  # of all workers together, whose differences are named
_INSIDE = (
    " What differs in the forward pass may be set around it: look for autocast, sdpa_kernel or a "
    "flag that only some ranks set."
)


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
        self._different: tuple[str, ...] = ()  # settings of the precision, in words

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
        found = [d.name for d in step.gathered.differences if d.kind is StateKind.PRECISION]
        self._different = tuple(found) or self._different
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
        words = _cut(self._words)
        ranks = self._ranks | seen.ranks
        if seen.count:
            until = "" if seen.open else f" until step {seen.last:,}"
            who = name_ranks(seen.ranks)
            what = "; ".join(self._different) or "types, autocast or torch.backends differ"
            words.insert(0, f"in the forward pass of {who}{until}, {what}")
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
                "inside": _INSIDE if seen.count else "",
            },
            numbers={"differences": words, "steps_in_another_precision": seen.count},
            status="open" if self._minority or seen.open else "closed",
        )


class DifferentConfiguration(Detector):
    """Ranks that were given other settings of the training; they are known at its start.

    ``settings``: each rank's settings that differ, by name, in rank order; empty when unknown.
    """

    SETTINGS = ("_minority", "_words", "_severity", "_reported")

    def __init__(self, settings: Sequence[Mapping[str, Any]] = ()) -> None:
        self._minority, self._words, self._severity = compare_settings(settings)
        self._reported = False

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report with the first one after a start."""
        if self._reported or not self._minority:
            return ()
        self._reported = True
        fields = {"what": "; ".join(_cut(self._words))}
        numbers = {"differences": list(self._words)}
        at = step.gathered.step
        ranks = self._minority
        return (evidence_at(at, CAUSE, self._severity, ranks, fields, numbers, key=CONFIGURED),)


class DifferentModes(Detector):
    """Modules in training mode on some workers, and in evaluation mode on others."""

    def __init__(self) -> None:
        self._modes = PersistentFault()
        self._what: tuple[str, ...] = ()
        self._read: dict[int, tuple[int, int]] = {}  # digest by worker, and where it was new
        self._alike = -1  # the last step in which the modes of all were the same

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report different modes, and their end."""
        gathered = step.gathered
        for rank, digest in enumerate(gathered.workers["modes"].tolist()):
            if digest not in (MISSING_INT, self._read.get(rank, (MISSING_INT, 0))[0]):
                self._read[rank] = digest, gathered.step
        if not step.all_known("modes"):
            return ()
        found = [d for d in gathered.differences if d.kind is StateKind.MODE]
        ranks = {r for d in found for r in minority_ranks(d.digests_W.tolist())}
        self._what = tuple(d.name for d in found) or self._what
        seen = self._modes
        changed = seen.observe(gathered.step, ranks)
        if seen.count == 1 and seen.first == gathered.step:
            steps = [new for _, new in self._read.values() if new > self._alike]
            seen.first = min(steps, default=seen.first)
        self._alike = self._alike if ranks else gathered.step
        if not changed:
            return ()
        numbers = {"steps": seen.count, "modules": list(self._what)}
        fields = {"what": "; ".join(_cut(self._what))}
        return (seen.evidence(MODES_DIFFER, Severity.WARNING, seen.ranks, fields, numbers),)


def _cut(words: Sequence[str]) -> list[str]:
    """Return the first differences, and how many others there are."""
    more = len(words) - _MOST_LISTED
    rest = [f"and {count(more, 'other difference')}"] if more > 0 else []
    return [*words[:_MOST_LISTED], *rest]


class EvaluationMode(Detector):
    """Dropout layers, or a whole model, in evaluation mode on all workers, while it trains."""

    def __init__(self) -> None:
        self._spans = {DROPOUT: PersistentFault(_READINGS), EVALUATES: PersistentFault(_READINGS)}

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step in which modes were read; report what is off, and its end."""
        if not step.all_known("dropout_off"):
            return
        off_W = step.gathered.workers["dropout_off"]
        for value, (key, span) in enumerate(self._spans.items(), start=1):
            ranks = range(len(off_W)) if (off_W == value).all() else ()
            if span.observe(step.gathered.step, ranks):
                again = " It is on again." if key == DROPOUT else " It is in training mode again."
                fields = {"over": "" if span.open else again}
                numbers = {"readings": span.count}
                yield span.evidence(MODES_DIFFER, Severity.NOTE, (), fields, numbers, key=key)


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (
        EnvironmentMismatch(run.environments),
        DifferentConfiguration(run.settings),
        DifferentModes(),
        EvaluationMode(),
        DifferentSettings(run.num_workers, run.plan),
        ScheduleByPass(),
        ScheduleEnded(),
        ScheduleJump(),
        PlannedSeed(run.plan.seed, run.sampler_seeds),
    )


_MODE_NAMES = ("evaluation", "training")
_MISSING = "not set"


class ComparedNames(Combiner):
    """Compares all workers' modes of modules, settings of the optimizer and precision, by name.

    A worker sends those that have changed, and a precision that is new. Modes that differ are a
    difference of every step in which they are read, settings and precisions that differ one of the
    step in which they begin to.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._modes: dict[int, dict[str, int]] = {}
        self._settings: dict[int, dict[str, str]] = {}
        self._precisions: dict[int, dict[str, str]] = {}  # by digest
        self._named: set[tuple[int, ...]] = set()  # digests of all workers that were compared

    def combine(self, messages: Messages, columns: Columns) -> Mapping[str, Any]:
        """Return the differences, in words; modules that differ between the same workers as one."""
        new_settings = False
        for rank, named in enumerate(messages.named):
            if MODES in named:
                names, flags = named[MODES]
                self._modes[rank] = dict(zip(names, map(int, flags), strict=False))
            if SETTINGS in named:
                self._settings[rank] = named[SETTINGS]
                new_settings = True
            if PRECISION in named:
                code = int(columns["precision"][rank])
                self._precisions[code] = named[PRECISION]
        found: list[StateDifference] = []
        every = range(len(messages))
        if _differs(columns["modes"]):
            found += self._different_modes(len(messages))
        if new_settings and _differs(columns["settings_digest"]):
            found += [
                _name_difference(StateKind.OPTION, f"{name} is {name_values(values_W)}", numbers_W)
                for name, values_W, numbers_W in _differing(list(map(self._settings.get, every)))
            ]
        if self._precisions and _differs(columns["precision"]):
            found += self._different_precisions(tuple(columns["precision"].tolist()))
        return {"differences": tuple(found)} if found else {}

    def _different_modes(self, num_workers: int) -> list[StateDifference]:
        modes_W = [self._modes.get(rank, {}) for rank in range(num_workers)]
        alike: dict[tuple[tuple[int, ...], bool], list[str]] = {}
        beside = {name: " elements)" in name for name in modes_W[0]}  # outside of the model
        for name in modes_W[0]:
            if all(name in modes for modes in modes_W):
                flags_W = tuple(modes[name] for modes in modes_W)
                if len(set(flags_W)) > 1:
                    alike.setdefault((flags_W, beside[name]), []).append(name)
        return [
            _name_difference(
                StateKind.MODE,
                f"{name_modules(names, [name for name in beside if beside[name] is outside])} "
                f"({name_values(flags_W, _MODE_NAMES.__getitem__)})",
                flags_W,
            )
            for (flags_W, outside), names in alike.items()
        ]

    def _different_precisions(self, codes_W: tuple[int, ...]) -> list[StateDifference]:
        if codes_W in self._named or len(self._named) == _MOST_PRECISIONS:
            return []
        self._named.add(codes_W)
        return [
            _name_difference(
                StateKind.PRECISION, f"{name.replace('_', ' ')}: {name_values(values_W)}", numbers_W
            )
            for name, values_W, numbers_W in _differing([self._precisions.get(c) for c in codes_W])
        ]


def _differing(
    settings_W: Sequence[Mapping[str, str] | None],
) -> Iterator[tuple[str, list[str | None], list[int]]]:
    """Yield the settings that differ: the name, each worker's value, and a number for it."""
    for name in dict.fromkeys(name for each in settings_W if each for name in each):
        values_W = [None if each is None else each.get(name, _MISSING) for each in settings_W]
        values = list(dict.fromkeys(value for value in values_W if value is not None))
        if len(values) > 1:
            yield name, values_W, [-1 if v is None else values.index(v) for v in values_W]


def _differs(digests_W: Ints) -> bool:
    known_W = digests_W != MISSING_INT
    return bool(known_W.all() and (digests_W != digests_W[0]).any())


def _name_difference(kind: StateKind, words: str, values_W: Sequence[int]) -> StateDifference:
    none_W = np.zeros(len(values_W), bool)
    return StateDifference(kind, words, np.array(values_W, np.int64), none_W)


make_combiner = ComparedNames

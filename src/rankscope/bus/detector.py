"""Detectors, the evidence of faults that they return, and its finding in words."""

import tomllib
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

from rankscope.bus.finding import Finding, Severity
from rankscope.bus.plan import Plan
from rankscope.bus.step import GatheredStep
from rankscope.bus.steps import Step, StepBatch
from rankscope.bus.words import count, name_ranks
from rankscope.stats.state import Stateful

Ranks = Callable[[], Sequence[int]]
"""Returns ranks, as of the moment of the call."""


@dataclass(slots=True)
class FlaggedWorkers:
    """Workers that the outlier judge has flagged; other judges leave them out."""

    now: Ranks = tuple  # workers that differ from the others at present
    steadily: Ranks = tuple  # those of them that differ in most steps
    left_out: Ranks = tuple  # workers that are not compared in the present step


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of a run that judges are made for."""

    num_workers: int
    hosts: Sequence[str] = ()  # host of each rank; empty when unknown
    environments: Sequence[Mapping[str, Any]] = ()  # environment of each rank; empty when unknown
    plan: Plan = field(default_factory=Plan)
    # by group, the type in which its gradient is meant to be reduced; None if unknown
    reduced_in: Mapping[str, str] | None = None
    comm_hook: str = ""  # name of the training's own communication hook that reduces gradients
    # seed of each rank's sampler, None where it is not known
    sampler_seeds: Sequence[int | None] = ()
    # whether all ranks' data loaders are known to draw with replacement
    with_replacement: bool = False
    # what splits the data in the loader of the first rank, and into how many parts
    data_splits: Sequence[tuple[str, int]] = ()
    # what decides the order of the first rank's data: "nothing", "set_epoch", "generator"; or ""
    data_order: str = ""
    # ranks whose data sets are known to have other rows than most, or another order of them
    other_rows: Sequence[int] = ()
    data_length: int | None = None  # how many samples the data set has; None if unknown
    # rows of the data sets of the loaders; None if unknown
    data_rows: int | None = None
    unsaved_buffers: Sequence[str] = ()  # names of buffers that no checkpoint holds
    world_size: int = 0  # number of processes of the job; 0 if unknown
    by_loop: bool = False  # whether the training's own loop reduces, or its optimizer
    declared_micro_batches: int = 0  # by which a framework divides each loss; 0 if unknown
    trained: int = 0  # number of parameters that are trained; 0 if unknown
    unheld: bool = False  # whether the optimizer is known to hold fewer tensors than are trained
    # each rank's settings of the training that differ between ranks; empty when unknown
    settings: Sequence[Mapping[str, Any]] = ()
    after_complete: bool = False  # whether it continues a run whose training had ended by itself
    # workers that some judges leave out
    flagged: FlaggedWorkers = field(default_factory=FlaggedWorkers)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a run is checked for."""

    what: str  # the fault that it finds, in words
    needs: int  # steps after which no finding means no fault
    impossible: str = ""  # why this run cannot show the fault; empty if it can
    pending: str = ""  # why it was not checked yet, whatever the number of steps; empty if it was


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """Facts of a run that decide on its checks."""

    num_workers: int  # W, at least 2
    options: Mapping[str, Any]  # the options of ``watch``, as ``run.json`` has them
    samples: bool = True  # whether its samples were identified
    canaries: bool | None = None  # whether a canary has run; None if unknown
    # why a kind of evidence measured nothing, by its name
    unmeasured: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FaultEvidence:
    """Evidence of one fault, over the whole run so far."""

    cause: str
    severity: Severity  # its present severity
    ranks: tuple[int, ...]
    first_step: int  # the first step that shows it
    last_step: int  # the last step that shows it
    count: int  # amount of evidence; each doubling makes an event of the finding
    # fields of the rules' templates, besides ``Ranks``, ``ranks``, ``first``, ``last``, ``steps``,
    # ``since``, ``from_step``, ``are``, ``over`` and ``ended``, which follow from the rest
    fields: Mapping[str, object] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)  # evidence for the record
    key: str = ""  # names the fault inside the run, and so its finding; the cause, if empty
    groups: tuple[str, ...] = ()  # the parameter groups concerned; empty when none in particular
    status: str = "open"  # ``open``, or ``closed`` once the fault has healed

    def __post_init__(self) -> None:
        named = name_ranks(self.ranks)
        first = f"{self.first_step:,}"
        last = f"{self.last_step:,}"
        usual = {
            "Ranks": named.capitalize(),
            "ranks": named,
            "first": first,
            "last": last,
            "steps": count(self.count, "step"),
            "since": f"since about step {first}",
            "from_step": f"from step {first} on",
            "are": "are",
            "over": "",
            "ended": "",
        }
        if self.status != "open":
            usual |= {
                "since": f"from about step {first} to about step {last}",
                "from_step": f"from step {first} to step {last}",
                "are": "were",
                "over": f" It was last seen at step {last}.",
                "ended": " It is over now.",
            }
        object.__setattr__(self, "fields", {**usual, **self.fields})


def evidence_at(
    step: int,
    cause: str,
    severity: Severity,
    ranks: Iterable[int] = (),
    fields: Mapping[str, object] | None = None,
    numbers: Mapping[str, object] | None = None,
    *,
    key: str = "",
) -> FaultEvidence:
    """Return evidence that one step alone shows."""
    who = tuple(sorted(ranks))
    return FaultEvidence(cause, severity, who, step, step, 1, fields or {}, numbers or {}, key)


BEGUN_ANEW = "begun-anew"
"""Id of the finding that a restarted job is another training, see :meth:`Detector.begins_anew`."""


class Detector(Stateful, ABC):
    """Watches the stream of steps for one kind of fault.

    The evidence does not depend on how the steps are cut into batches. The state after ``close``
    lets another detector continue with the steps of a restarted job; it has the names of its class,
    of which a run has one, and of its attributes.
    """

    def observe(self, steps: StepBatch) -> Iterator[Iterable[FaultEvidence]]:
        """Process consecutive steps, one with each iteration; yield each step's new evidence."""
        for step in steps:
            yield list(self.observe_step(step))

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; return new or changed evidence.

        A detector overrides this, or :meth:`observe` where it compares several steps at once.
        """
        raise NotImplementedError

    def begins_anew(self, gathered: GatheredStep) -> FaultEvidence | None:
        """Return evidence that one of a restarted job's first steps begins another training.

        Its key is ``BEGUN_ANEW``. A restored detector is asked before it processes such a step.
        """
        return None

    def close(self) -> Iterable[FaultEvidence]:
        """End the run; return the evidence that had to wait for its end."""
        return ()


class RestartDetector(Detector):
    """A detector that compares a restarted job with the one before it, which ``close`` has ended.

    A step after ``close`` is one of a restarted job, whether this object continues or another that
    was restored from its state.
    """

    def __init__(self) -> None:
        self._ended = False

    def close(self) -> Iterable[FaultEvidence]:
        """End the run; a session that begins after this is a restarted job's."""
        self._ended = True
        return ()

    def _restarts(self) -> bool:
        """Return whether a restarted job begins here; once for each."""
        ended, self._ended = self._ended, False
        return ended


HEALED_AFTER = 16
"""Steps without a trace of it, one after the other, after which a fault has healed."""


class PersistentFault(Stateful):
    """One kind of fault over the run.

    It opens after ``needed`` steps that show it on the same worker, if ``in_a_row`` one after the
    other.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ("_needed", "_in_a_row")

    def __init__(self, needed: int = 1, *, in_a_row: bool = False) -> None:
        self._needed = needed
        self._in_a_row = in_a_row
        self._shown: dict[int, tuple[int, int]] = {}
        self._quiet = 0
        self.open = False  # whether it has opened and not healed since
        self.first = -1  # the first step that showed it; -1 before
        self.last = -1  # the last step that showed it; -1 before
        self.count = 0  # number of steps that showed it
        self.ranks: set[int] = set()  # all workers that showed it, as far as they were named

    def see(
        self, step: int, ranks: Iterable[int] = (), *, first: int | None = None, before: int = 0
    ) -> None:
        """Add a step that shows the fault, and open it without waiting for more.

        ``first`` and ``before`` are for the first call: the first step that showed the fault, and
        the number of earlier steps that did.
        """
        if not self.count:
            self.first = step if first is None else first
            self.count = before
        self.last = step
        self.count += 1
        self.ranks.update(ranks)
        self.open = True

    def observe(self, step: int, ranks: Iterable[int]) -> bool:
        """Add a step that ``ranks`` show the fault in, if any.

        Returns whether enough steps show it, this one among them, or it has just healed.
        """
        now = set(ranks)
        if self._in_a_row and self._shown:
            self._shown = {rank: self._shown[rank] for rank in now if rank in self._shown}
        for rank in now:
            first, count = self._shown.get(rank, (step, 0))
            self._shown[rank] = first, count + 1
        certain = {rank for rank in now if self._shown[rank][1] >= self._needed}
        if certain:
            first = min(self._shown[rank][0] for rank in certain)
            before = max(self._shown[rank][1] for rank in certain) - 1
            self.see(step, certain, first=first, before=before)
            self._quiet = 0
            return True
        self._quiet = 0 if now else self._quiet + 1
        if self._quiet < HEALED_AFTER:
            return False
        self._shown = {}
        return self.close()

    def close(self) -> bool:
        """Close the fault; return whether it was open."""
        was_open = self.open
        self.open = False
        return was_open

    def severity(self, num_workers: int) -> Severity:
        """Return a note unless fewer than half of the workers show it: either half may be right."""
        return Severity.WARNING if 2 * len(self.ranks) < num_workers else Severity.NOTE

    def evidence(
        self,
        cause: str,
        severity: Severity,
        ranks: Iterable[int] = (),
        fields: Mapping[str, object] | None = None,
        numbers: Mapping[str, object] | None = None,
        *,
        key: str = "",
    ) -> FaultEvidence:
        """Return the fault as evidence."""
        return FaultEvidence(
            cause=cause,
            severity=severity,
            ranks=tuple(sorted(ranks)),
            first_step=self.first,
            last_step=self.last,
            count=self.count,
            fields=fields or {},
            numbers=numbers or {},
            key=key,
            status="open" if self.open else "closed",
        )


@dataclass(frozen=True, slots=True)
class Advice:
    """The text of a finding of one severity."""

    explanation: str  # what happens, as a template
    next_check: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause: an entry of a ``findings.toml``, under the name that findings and records use.

    In explanation and next check, words in {braces} are filled in by the judge that found it.
    """

    title: str
    family: str  # the part of the overview that lists it
    meaning: str  # its sentence in the overview
    evidence: str  # its evidence, in a word or two
    page: str  # its section: symptoms, origin and remedy, in Markdown
    advice: Mapping[Severity, Advice]  # the finding's text, by severity
    explains: tuple[str, ...] = ()  # causes whose findings are consequences of this one
    explains_own: tuple[str, ...] = ()  # the same of findings that concern no other workers
    settles: tuple[str, ...] = ()  # causes whose open question this one answers


_WORDS = ("title", "family", "meaning", "evidence", "page")
_LISTS = ("explains", "explains_own", "settles")


def _rule(entry: Mapping[str, Any]) -> Rule:
    advice = {
        severity: Advice(**entry[str(severity)])
        for severity in reversed(Severity)
        if str(severity) in entry
    }
    words = {name: entry[name].strip() for name in _WORDS}
    lists: dict[str, Any] = {name: tuple(entry.get(name, ())) for name in _LISTS}
    return Rule(**words, advice=advice, **lists)


class _Rules(Mapping[str, Rule]):
    """All rules by name, read at their first use."""

    @cached_property
    def _all(self) -> Mapping[str, Rule]:
        evidence = import_module("rankscope.evidence").EVIDENCE
        entries = [tomllib.loads(each.findings) for each in evidence]
        return {cause: _rule(entry) for each in entries for cause, entry in each.items()}

    def __getitem__(self, name: str) -> Rule:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


RULES: Mapping[str, Rule] = _Rules()
"""All rules, by name."""


def finding_of(
    evidence: FaultEvidence, step: int, *, name: str = "", begun_at: int | None = None
) -> Finding:
    """Return evidence as a finding, with the rule's explanation and next check.

    The evidence's key names the rule if there is one of this name, else its cause. A fault that is
    younger than ``begun_at``, the run's first step, can be undone by a checkpoint.
    """
    advice = RULES[evidence.key if evidence.key in RULES else evidence.cause].advice
    back = "start again with the fault repaired"
    if begun_at is not None and evidence.first_step > begun_at:
        back = f"go back to a checkpoint before step {evidence.first_step:,}"
    fields = {**evidence.fields, "back": back, "Back": back.capitalize()}
    text = advice[evidence.severity]
    return Finding(
        id=name or evidence.key or evidence.cause,
        cause=evidence.cause,
        severity=evidence.severity,
        ranks=evidence.ranks,
        first_step=evidence.first_step,
        last_step=evidence.last_step,
        explanation=text.explanation.format_map(fields),
        next_check=text.next_check.format_map(fields),
        evidence=evidence.numbers,
        groups=evidence.groups,
        status=evidence.status,
        step=step,
    )


def finding_at(
    step: int,
    cause: str,
    severity: Severity,
    ranks: Iterable[int],
    fields: Mapping[str, object],
    numbers: Mapping[str, object],
) -> Finding:
    """Return a finding of one step alone, which is named after it."""
    evidence = evidence_at(step, cause, severity, ranks, fields, numbers)
    return finding_of(evidence, step, name=f"{cause}:step-{step}")


LATENESS = 192
"""Steps by which a cause may be found later than its consequence: digests alternate."""

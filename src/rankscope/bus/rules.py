"""Explanation and next check of each finding, read from the ``findings.toml`` of each evidence.

One entry per cause, under the stable name that findings, records and command lines use:

- ``title``: the cause in a few words;
- ``family``, ``meaning``, ``evidence``: its row in the overview of ``docs/causes.md``;
- ``page``: its section there, in Markdown;
- ``explains``: causes whose findings are mere consequences where this one is found;
- ``explains_own``: the same of those that name the same workers alone;
- ``settles``: causes whose open question this one answers;
- a table for each severity that it can have, with ``explanation`` (what happens) and ``next_check``
  (what to look at next). Words in {braces} are filled in by the judge that found the evidence.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

from rankscope.bus.detector import FaultEvidence
from rankscope.bus.finding import Finding, Severity


@dataclass(frozen=True, slots=True)
class Advice:
    """The text of a finding of one severity."""

    explanation: str  # what happens, as a template
    next_check: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause."""

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


LATENESS = 192
"""Steps by which a cause may be found later than its consequence: digests alternate."""

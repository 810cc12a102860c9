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

from rankscope.bus.finding import Severity


@dataclass(frozen=True, slots=True)
class Advice:
    """The text of a finding of one severity.

    Attributes:
        explanation: What happens, as a template.
        next_check: What to look at next.
    """

    explanation: str
    next_check: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause.

    Attributes:
        title: The cause in a few words.
        family: The part of the overview that lists it.
        meaning: Its sentence in the overview.
        evidence: Its evidence, in a word or two.
        page: Its section: symptoms, origin and remedy, in Markdown.
        advice: The finding's text, by severity.
        explains: Causes whose findings are consequences of this one.
        explains_own: The same of findings that concern no other workers.
        settles: Causes whose open question this one answers.
    """

    title: str
    family: str
    meaning: str
    evidence: str
    page: str
    advice: Mapping[Severity, Advice]
    explains: tuple[str, ...] = ()
    explains_own: tuple[str, ...] = ()
    settles: tuple[str, ...] = ()


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


_START_AGAIN = "start again with the fault repaired"


def describe(
    cause: str, severity: Severity, fields: Mapping[str, object], back: str = _START_AGAIN
) -> tuple[str, str]:
    """Return explanation and next check of a finding, with the fields filled in.

    Args:
        cause: Name of the rule.
        severity: How bad it is.
        fields: Values of the templates' fields, from the detector.
        back: How to undo the effect of the fault, see :func:`go_back`.

    Raises:
        KeyError: The table has no such cause or severity, or a field is missing.
    """
    advice = RULES[cause].advice[severity]
    fields = {**fields, "back": back, "Back": back.capitalize()}
    return advice.explanation.format_map(fields), advice.next_check.format_map(fields)


def go_back(first_step: int, begun_at: int) -> str:
    """Return how to undo the effect of a fault: by a checkpoint, where the run may have one.

    ``first_step`` is the first one that shows the fault, ``begun_at`` the first one of the run.
    """
    if first_step <= begun_at:
        return _START_AGAIN
    return f"go back to a checkpoint before step {first_step:,}"


LATENESS = 192
"""Steps by which a cause may be found later than its consequence: digests alternate."""

"""What each finding says, and what to check next: read from the ``findings.toml`` of each evidence.

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
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from rankscope.core.finding import Finding, Severity
from rankscope.evidence import EVIDENCE


@dataclass(frozen=True, slots=True)
class Advice:
    """What a finding of one severity says.

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
        meaning: What the overview says of it.
        evidence: What it rests on, in a word or two.
        page: What it looks like, where it comes from and what to do, in Markdown.
        advice: What to say, by severity.
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


def _load() -> Mapping[str, Rule]:
    entries = [tomllib.loads(each.findings) for each in EVIDENCE]
    return {cause: _rule(entry) for each in entries for cause, entry in each.items()}


def _rule(entry: Mapping[str, Any]) -> Rule:
    advice = {
        severity: Advice(**entry[str(severity)])
        for severity in reversed(Severity)
        if str(severity) in entry
    }
    words = {name: entry[name].strip() for name in _WORDS}
    lists: dict[str, Any] = {name: tuple(entry.get(name, ())) for name in _LISTS}
    return Rule(**words, advice=advice, **lists)


RULES: Mapping[str, Rule] = _load()


_START_AGAIN = "start again with the fault repaired"


def describe(
    cause: str, severity: Severity, fields: Mapping[str, object], back: str = _START_AGAIN
) -> tuple[str, str]:
    """Return explanation and next check of a finding, with the fields filled in.

    Args:
        cause: Name of the rule.
        severity: How bad it is.
        fields: What the detector fills in.
        back: How to undo what the fault has done, see :func:`go_back`.

    Raises:
        KeyError: The table has no such cause or severity, or a field is missing.
    """
    advice = RULES[cause].advice[severity]
    fields = {**fields, "back": back, "Back": back.capitalize()}
    return advice.explanation.format_map(fields), advice.next_check.format_map(fields)


def go_back(first_step: int, begun_at: int) -> str:
    """Return how to undo what a fault has done: by a checkpoint, where the run may have one.

    Args:
        first_step: The first step that shows the fault.
        begun_at: The first step of the run.
    """
    if first_step <= begun_at:
        return _START_AGAIN
    return f"go back to a checkpoint before step {first_step:,}"


LATENESS = 192
"""Steps by which a cause may be found later than its consequence: digests take turns."""


def explanations(findings: Sequence[Finding]) -> dict[str, Finding | None]:
    """Return for each finding, by id, the one of which it is a mere consequence, if any.

    Args:
        findings: All findings of a run.
    """
    causes: dict[str, list[tuple[int, Finding]]] = defaultdict(list)
    for place, finding in enumerate(findings):
        for name in _explained(finding):
            if sum(_covers(cause, finding) for _, cause in causes[name]) < 2:  # one may ask itself
                causes[name].append((place, finding))
    return {effect.id: _cause_of(effect, causes) for effect in findings}


def _cause_of(
    effect: Finding, causes: Mapping[str, Sequence[tuple[int, Finding]]]
) -> Finding | None:
    """Return the first finding that explains another."""
    named = [one for name in {effect.id, effect.cause} for one in causes.get(name, ())]
    fitting = [one for one in named if one[1].id != effect.id and _explains(one[1], effect)]
    return min(fitting, key=itemgetter(0))[1] if fitting else None


def _explained(cause: Finding) -> Collection[str]:
    rule = RULES.get(cause.id) or RULES.get(cause.cause)
    return () if rule is None else (*rule.explains, *rule.explains_own)


def _covers(earlier: Finding, later: Finding) -> bool:
    """Return whether an earlier finding explains all that a later one of its kind does."""
    return earlier.severity >= later.severity and earlier.first_step <= later.first_step


def settled_by(finding: Finding, findings: Iterable[Finding]) -> Finding | None:
    """Return the latest finding that answers the question that another one leaves open, if any.

    A canary of the suspected workers does: it ran one of their batches on every worker.

    Args:
        finding: The one with an open question.
        findings: All findings of the run.
    """
    answers = [one for one in findings if settles(one, finding)]
    return max(answers, key=lambda answer: answer.last_step, default=None)


def settles(answer: Finding, finding: Finding) -> bool:
    """Return whether a finding answers the question that another one leaves open."""
    rule = RULES.get(answer.id)
    if rule is None or finding.cause not in rule.settles or answer.last_step < finding.first_step:
        return False
    asked, answered = set(finding.ranks), set(answer.ranks)
    return bool(asked & answered if finding.cause == "inconclusive" else asked <= answered)


def next_check_of(finding: Finding, findings: Iterable[Finding]) -> str:
    """Return what to look at next, given what other findings of the run have settled."""
    answer = settled_by(finding, findings)
    if answer is None:
        return finding.next_check
    return f"{first_sentence(answer)} {answer.next_check}"


def first_sentence(finding: Finding) -> str:
    """Return the first sentence of what a finding says."""
    return f"{finding.explanation.partition('. ')[0].rstrip('.')}."


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings with the most probable cause first, consequences of others last.

    Args:
        findings: All findings of a run.

    Returns:
        The same findings: those that nothing explains first; among them the most severe, open
        before closed, then the earliest.
    """
    causes = explanations(findings)
    return sorted(
        findings,
        key=lambda f: (causes[f.id] is not None, -f.severity, f.status != "open", f.first_step),
    )


def _explains(cause: Finding, effect: Finding) -> bool:
    lasting = cause.first_step <= effect.first_step + LATENESS
    rule = RULES.get(cause.id) or RULES.get(cause.cause)
    own = rule is not None and {effect.id, effect.cause} & set(rule.explains_own)
    concerned = not own or set(effect.ranks) <= set(cause.ranks)
    return lasting and concerned and cause.severity >= effect.severity

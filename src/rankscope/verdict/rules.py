"""Explanations between the findings of a run, their order, and the page of all causes.

One fault leaves many traces: when a worker's gradients are not reduced, its parameters drift, and
its loss follows. The rules declare which finding explains which (``explains``), and which one
settles the open question of which (``settles``), see :mod:`rankscope.bus.detector`.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import takewhile

from rankscope.bus.detector import BEGUN_ANEW, LATENESS, RULES
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.words import count, listed


def explanations(findings: Sequence[Finding]) -> dict[str, Finding | None]:
    """Return, by id of each finding of a run, the finding of which it is a consequence, if any."""
    in_order = sorted(findings, key=lambda each: (each.first_step, each.id))
    causes: dict[str, list[Finding]] = defaultdict(list)
    for finding in in_order:
        for name in _explained(finding):
            alike = [cause for cause in causes[name] if _explained(cause) == _explained(finding)]
            covering = sum(  # they explain all effects of this one
                cause.severity >= finding.severity and cause.first_step <= finding.first_step
                for cause in alike
            )
            if covering < 2:  # a finding covers itself
                causes[name].append(finding)
    found = {effect.id: _cause_of(effect, causes) for effect in findings}
    for finding in in_order:
        cause = found[finding.id]
        path = {finding.id}
        while cause is not None and cause.id not in path:
            path.add(cause.id)
            cause = found[cause.id]
        if cause is not None and cause.id == finding.id:  # a circle: the earliest is the cause
            found[finding.id] = None
    return found


def _cause_of(effect: Finding, causes: Mapping[str, Sequence[Finding]]) -> Finding | None:
    """Return the first finding that explains another; one that names its id before others."""
    named = (one for name in (effect.id, effect.cause) for one in causes.get(name, ()))
    return next((one for one in named if one.id != effect.id and _explains(one, effect)), None)


def _explained(cause: Finding) -> Collection[str]:
    rule = RULES.get(cause.id) or RULES.get(cause.cause)
    return () if rule is None else (*rule.explains, *rule.explains_own)


def settled_by(finding: Finding, findings: Iterable[Finding]) -> Finding | None:
    """Return the latest finding of a run that settles the open question of another, if any."""
    answers = [one for one in findings if settles(one, finding)]
    return max(answers, key=lambda answer: answer.last_step, default=None)


def settles(answer: Finding, finding: Finding) -> bool:
    """Return whether a finding settles the open question of another."""
    rule = RULES.get(answer.id)
    if rule is None or finding.cause not in rule.settles or answer.last_step < finding.first_step:
        return False
    suspected = set(finding.ranks)
    tested = set(answer.ranks)
    if finding.cause == "inconclusive":
        return bool(suspected & tested)
    return suspected <= tested


def next_check_of(finding: Finding, findings: Iterable[Finding]) -> str:
    """Return the next check, given the findings of the run that settle this one."""
    answer = settled_by(finding, findings)
    if answer is None:
        return finding.next_check
    return f"{first_sentence(answer)} {answer.next_check}"


def faults_in_words(findings: Iterable[Finding]) -> str:
    """Return how many errors and warnings there are, in words; empty if none."""
    totals = Counter(finding.severity for finding in findings)
    found = [each for each in (Severity.ERROR, Severity.WARNING) if totals[each]]
    return listed([count(totals[each], str(each)) for each in found])


def first_sentence(finding: Finding, known: Iterable[Finding] = ()) -> str:
    """Return the first sentence of a finding's explanation, for a headline.

    A long list of names is shortened, see :func:`shorter_lists`. Where the sentence bounds the
    beginning, it has the earliest step that is ``known`` from the findings of the run.
    """
    sentence = f"{finding.explanation.partition('. ')[0].rstrip('.')}."
    first = _first_step_known(finding, known)
    sentence = sentence.replace(_BOUND.format(finding.first_step), _BOUND.format(first))
    names = finding.evidence.get("names")
    return shorter_lists(sentence, [*map(str, names)] if isinstance(names, list) else [])


_BOUND = "since step {:,} at the latest"


def _first_step_known(finding: Finding, known: Iterable[Finding]) -> int:
    """Return the first step of a finding, or of an exact one that follows from it if before."""
    earlier = [
        other.first_step
        for other in known
        if other.severity is Severity.ERROR
        and other.cause == finding.cause
        and set(other.ranks) & set(finding.ranks)
        and _explains(finding, other)
    ]
    return min([finding.first_step, *earlier])


_LONGEST_LIST = 40  # characters of a list of names that a headline may have
_OTHERS = r"(?P<others>\d[\d,]*) (?:more|others|other(?: (?:group|difference|moment)s?)?)"
_DOTTED = r"[A-Za-z_]\w*(?:\.\w+)+"


def shorter_lists(sentence: str, recorded: Sequence[str] = ()) -> str:
    """Return a sentence in which long lists of parameters are a few words.

    A list in brackets becomes their number and the module that has all of them, if it is half of
    each path; any other becomes its first name and the number of the others. ``recorded``: all
    names of a list of which the sentence has the first ones.

    Example:
        >>> shorter_lists("They (layers.0.mlp.up.weight and layers.0.mlp.down.weight) differ.")
        'They (2 under layers.0.mlp) differ.'
    """
    own = sorted(map(re.escape, recorded), key=len, reverse=True)
    name = rf"(?<![\w.])(?:{'|'.join([*own, _DOTTED])})(?!\w|\.\w)"

    def shorter(found: re.Match[str]) -> str:
        names = re.findall(name, found[0])
        others = int((found["others"] or "0").replace(",", ""))
        if others + len(names) == 1 or len(found[0]) <= _LONGEST_LIST:
            return found[0]
        known = recorded if {*names} <= {*recorded} else names
        if found["bracket"] and len(known) == others + len(names) and _common_part(known):
            return f"({len(known):,} under {_common_part(known)})"
        first = f"{names[0]} and {others + len(names) - 1:,} more"
        return f"({first})" if found["bracket"] else first

    lists = rf"{name}(?:[,;] {name})*(?:[,;]? and {name}|[,;]?(?: and)? {_OTHERS})?"
    return re.sub(rf"(?P<bracket>\()?{lists}(?(bracket)\))", shorter, sentence)


def _common_part(names: Sequence[str]) -> str:
    """Return the module that has all parameters; empty unless it is half of each path."""
    paths = [name.split(".") for name in names]
    levels = takewhile(lambda level: len({*level}) == 1, zip(*paths, strict=False))
    common = [level[0] for level in levels]
    return ".".join(common) if 2 * len(common) >= max(map(len, paths)) else ""


_HARMLESS = {"time.straggler", "verify.agrees", "update.agrees", "rng.identical"}
_USUAL = {BEGUN_ANEW, "loss.token_weighting"}  # ids: the mean over a worker's own tokens is DDP's


def is_harmless(finding: Finding) -> bool:
    """Return whether a run with this note is healthy: it is over, usual, or asks for nothing."""
    over = finding.status == "closed" or finding.id in _USUAL
    return finding.severity is Severity.NOTE and (over or finding.cause in _HARMLESS)


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings with the most probable cause first, consequences of others last.

    Findings without an explanation come first; among them the most severe, harmless notes last,
    open before closed, then the earliest.
    """
    causes = explanations(findings)

    def place(f: Finding) -> tuple[bool, int, bool, bool, int]:
        follows = causes[f.id] is not None
        return follows, -f.severity, is_harmless(f), f.status != "open", f.first_step

    return sorted(findings, key=place)


def _explains(cause: Finding, effect: Finding) -> bool:
    """Return whether one finding explains another: where each would, the one that names the id."""
    if cause.id in _explained(effect) and effect.id not in _explained(cause):
        return False
    lasting = cause.first_step <= effect.first_step + LATENESS
    rule = RULES.get(cause.id) or RULES.get(cause.cause)
    own = rule is not None and {effect.id, effect.cause} & set(rule.explains_own)
    concerned = not own or set(effect.ranks) <= set(cause.ranks)
    exact = rule is not None and effect.id in rule.explains_own  # a warning may have worse effects
    grave = cause.severity >= (Severity.WARNING if exact else effect.severity)
    return lasting and concerned and grave


_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")

_INTRODUCTION = """\
# Causes

A section is named after the `cause` in `findings.jsonl`; a name without a dot (except
`inconclusive`) is the `id` of a special case. Issue numbers are public reports of real jobs; the
[fault catalogue](../benchmarks/faults/catalogue.toml) has more. Evidence is
[exact](evidence.md) or [statistical](statistics.md).
"""
_HEAD = "| finding | meaning | evidence | severity |\n|---|---|---|---|"


def section_of(finding_id: str, cause: str) -> str:
    """Return the name of the section about a finding: its own rule's, or its cause's."""
    return finding_id if finding_id in RULES else cause


def page_of(finding_id: str, cause: str) -> str:
    """Return the documentation of a finding: a file of the project, and its section."""
    return f"docs/causes.md#{_anchor(section_of(finding_id, cause))}"


@cache
def cause_pages() -> dict[str, str]:
    """Return the sections about causes by name, as Markdown without links to other pages."""
    return {name: _LINK.sub(r"\1", rule.page) for name, rule in RULES.items()}


def page_of_causes() -> str:
    """Return the whole page, ``docs/causes.md``: an overview by family, then all sections."""
    families = dict.fromkeys(rule.family for rule in RULES.values())
    overviews = [f"**{family}**\n\n{_HEAD}\n{_rows(family)}" for family in families]
    sections = [f"## `{name}`\n\n{RULES[name].page}" for family in families for name in _of(family)]
    return "\n\n".join([_INTRODUCTION.strip(), *overviews, *sections]) + "\n"


def _of(family: str) -> list[str]:
    return [name for name, rule in RULES.items() if rule.family == family]


def _rows(family: str) -> str:
    rows = []
    for name in _of(family):
        rule = RULES[name]
        severities = ", ".join(map(str, rule.advice))
        link = f"[`{name}`](#{_anchor(name)})"
        rows.append(f"| {link} | {rule.meaning} | {rule.evidence} | {severities} |")
    return "\n".join(rows)


def _anchor(name: str) -> str:
    return name.replace(".", "")

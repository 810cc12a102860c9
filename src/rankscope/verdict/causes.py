"""The page of causes: the meaning of each finding, from the ``findings.toml`` of each evidence."""

import re
from functools import cache

from rankscope.bus.rules import RULES

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

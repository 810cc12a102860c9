"""The verdict as Markdown, to paste into a pull request or a chat. Needs no extra package.

Text from records is escaped: a name can neither make markup nor call anyone.
"""

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from rankscope.bus.words import printable
from rankscope.record import Run
from rankscope.report.study_words import (
    MEANS,
    RATIO,
    Entry,
    Study,
    alike,
    cells_of,
    headline_of,
    why_heading,
    why_they_differ,
)
from rankscope.verdict.assessment import Assessment
from rankscope.verdict.words import LOOKS, verdict_of

_SPECIAL = frozenset("\\`*_[]|~#$")
_ALT = {
    "overview": "Findings, averaged loss and the three metrics over the steps",
    "workers": "Every worker in every step",
    "model": "Gradients by group of parameters",
    "averaged-loss": "Averaged loss over the losses of the workers, by setting",
    "metrics": "The three metrics by setting",
    "cosine-heatmap": "Cosines of all pairs of workers, by setting",
}


def escaped(words: object) -> str:
    """Return words as Markdown shows them, in one line, whatever they contain."""
    line = " ".join(printable(str(words)).split())
    marked = "".join(f"\\{c}" if c in _SPECIAL else c for c in html.escape(line, quote=False))
    return marked.replace("@", "&#64;").replace("://", ":&#47;&#47;")


def code(name: object) -> str:
    """Return a name as inline code; whatever is more than a name, as words."""
    return f"`{name}`" if re.fullmatch(r"[\w.:-]+", str(name), re.ASCII) else escaped(name)


def run_markdown(run: Run, assessment: Assessment, pictures: Sequence[str] = ()) -> str:
    """Return the verdict of a run as Markdown; paths of PNG files are relative to the file."""
    verdict = verdict_of(run, assessment)
    tiles = [[escaped(tile[part]) for part in ("label", "value", "note")] for tile in verdict.tiles]
    rows = [
        (
            f"{LOOKS[finding['severity']].sign} {finding['severity']}",
            *(escaped(finding[part]) for part in ("title", "ranks", "steps")),
            code(finding["cause"]),
        )
        for finding in verdict.findings
    ]
    parts = [
        _heading(verdict.severity, assessment.headline),
        f"**{escaped(verdict.title)}** · {escaped(verdict.line)}",
        f"**What to do.** {escaped(assessment.recommendation)}",
        _table(("", "Finding", "Where", "When", "Cause"), rows) if rows else "No findings.",
        *(
            f"**{escaped(finding['title'])}.** {escaped(finding['explanation'])} "
            f"*Check next:* {escaped(finding['next_check'])}"
            for finding in verdict.findings
        ),
        "### Key numbers",
        _table(("", "", ""), [(label, f"**{value}**", note) for label, value, note in tiles]),
        *_listed("### What the measurements show", assessment.statements),
        *_shown(pictures),
    ]
    return "\n\n".join(parts) + "\n"


def study_markdown(study: Study, pictures: Sequence[str] = ()) -> str:
    """Return the verdict of a study as Markdown: configurations side by side, and each one's."""
    severity, headline = headline_of(study.entries)
    cells = [cells_of(entry) for entry in study.entries]
    parts = [
        _heading(severity, headline),
        f"**{escaped(study.name)}** · {escaped(study.caption)}",
        _table(list(cells[0]), [[escaped(cell) for cell in row.values()] for row in cells]),
        escaped(f"{study.settings} {MEANS} {RATIO}".strip()),
        "### Configuration assessment",
        *(_entry(entries) for entries in alike(study.entries)),
        f"### {why_heading(study.entries)}",
        *(
            f"**{escaped(name)}.** {escaped(words)}"
            for name, words in why_they_differ(study.entries)
        ),
        *_shown(pictures),
    ]
    return "\n\n".join(parts) + "\n"


def _heading(severity: str, headline: str) -> str:
    repeated = headline.lower().startswith(severity) or severity == "early"
    word = "" if repeated else f"{severity.capitalize()}: "
    return f"## {LOOKS[severity].sign} {word}{escaped(headline)}"


def _entry(entries: Sequence[Entry]) -> str:
    names = escaped("; ".join(entry.name for entry in entries))
    return (
        f"{LOOKS[entries[0].severity].sign} **{names}**: {escaped(entries[0].text('headline'))} "
        f"*What to do:* {escaped(entries[0].text('recommendation'))}"
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _listed(heading: str, sentences: Sequence[str]) -> list[str]:
    if not sentences:
        return []
    return [heading, "\n".join(f"- {escaped(sentence)}" for sentence in sentences)]


def _shown(pictures: Sequence[str]) -> list[str]:
    shown = []
    for path in pictures:
        words = _ALT.get(Path(path).stem, Path(path).stem)
        shown.append(f"![{words}](<{path.replace('<', '%3C').replace('>', '%3E')}>)")
    return shown

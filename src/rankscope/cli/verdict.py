"""The verdict in the terminal: first the problem, then the advice, then the numbers.

Text from records is printed as it is: never read as markup, and without control characters that
could move the cursor.
"""

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from rankscope.bus.finding import Finding, Severity
from rankscope.bus.words import count, listed, shortened
from rankscope.cli.output import (
    LONGEST,
    heading,
    labelled,
    plain,
    points,
    readable_lines,
    show,
    table,
    verdict_head,
)
from rankscope.record import Run
from rankscope.report.study_words import (
    MEANS,
    RATIO,
    Entry,
    alike,
    cells_of,
    headline_of,
    open_study,
    why_heading,
    why_they_differ,
)
from rankscope.verdict.assessment import Assessment
from rankscope.verdict.rules import explanations, ranked, section_of
from rankscope.verdict.words import (
    LOOKS,
    ranks_in_words,
    steps_in_words,
    tiles,
    title_of,
    title_of_finding,
    verdict_of,
)

NARROW = 76  # columns below which notes go on lines of their own
_LEAST_WIDTHS = {
    "Norm std": NARROW,
    "Averaged loss": 104,
    "× sampling": 104,
    "Different per step": LONGEST + 1,
}
"""Width of the lines from which the study's table has a column; the others it always has."""


def render_run(run: Run, assessment: Assessment, console: Console) -> None:
    """Print a run's whole report; RunError if the findings cannot be read."""
    verdict = verdict_of(run, assessment)
    console.print()
    show(console, verdict_lines(verdict.severity, assessment.headline, verdict.title))
    console.print()
    show(console, labelled("What to do", assessment.recommendation))
    show_command(assessment.command, console)
    if verdict.findings:
        heading(console, "Findings")
    for finding in verdict.findings:
        show(console, _finding(finding))
        console.print()
    heading(console, verdict.line, space=not verdict.findings)
    show(console, numbers_grid(verdict.tiles, narrow=console.width < NARROW))
    if assessment.statements:
        heading(console, "What the measurements show")
        points(console, assessment.statements)
    console.print()


def render_differences(differences: Sequence[str], status: str, console: Console) -> None:
    """Print how the findings of a new diagnosis differ from the run's own."""
    heading(console, "Diagnosed again", space=False)
    if not differences:
        show(console, plain("The findings are those in findings.jsonl."))
    else:
        show(console, plain("These findings are not those in findings.jsonl."))
        points(console, differences)
        if status == "running":
            show(console, plain("The run is not closed: it may report changes yet."))
    console.print()


def render_study(study_dir: Path, console: Console) -> None:
    """Print a study's verdict: its configurations side by side, and why they differ."""
    study = open_study(study_dir)
    severity, headline = headline_of(study.entries)
    console.print()
    show(console, verdict_lines(severity, headline, study.name))
    show(console, plain(study.caption, "dim"))
    console.print()
    width = min(console.width, LONGEST)
    names = cells_of(study.entries[0])
    columns = [name for name in names if width >= _LEAST_WIDTHS.get(name, 0)]
    grid = table(*columns, right=columns[2:])
    for entry in study.entries:
        cells = cells_of(entry)
        colours = {"Verdict": LOOKS[entry.severity].colour}
        grid.add_row(*(plain(cells[name], colours.get(name, "")) for name in columns))
    show(console, grid)
    ratio = RATIO if "× sampling" in columns else ""
    show(console, plain(f"{study.settings} {MEANS} {ratio}".strip(), "dim"))
    given: dict[str, str] = {}
    for entries in alike(study.entries):
        if entries[0].severity != "healthy":
            console.print()
            show(console, _entry(entries, given))
    heading(console, why_heading(study.entries))
    for title, words in why_they_differ(study.entries):
        show(console, labelled(title, words))
        console.print()


def verdict_lines(severity: str, headline: str, title: str) -> Text:
    """Return a verdict, its subject, and its headline below."""
    word = "TOO EARLY" if severity == "early" else severity.upper()
    return verdict_head(LOOKS[severity][:2], word, title, headline)


def _finding(finding: Mapping[str, Any]) -> Text:
    sign, colour, _ = LOOKS[finding["severity"]]
    return Text.assemble(
        (f"{sign} {finding['severity']}", f"bold {colour}"),
        "  ",
        plain(finding["title"], "bold"),
        "\n",
        plain(f"{finding['ranks']} · {finding['steps']}", colour),
        "\n",
        plain(finding["explanation"]),
        "\n",
        ("Check next: ", "bold"),
        plain(finding["next_check"]),
        "\n",
        ("More: ", "bold"),
        plain(f"rankscope causes {finding['about']}"),
    )


def numbers_grid(tiles: Sequence[Mapping[str, str]], *, narrow: bool) -> RenderableType:
    """Return key numbers, one below the other; their notes on lines of their own if narrow."""
    grid = Grid.grid(padding=(0, 2))
    for _ in range(2 if narrow else 3):
        grid.add_column()
    for tile in tiles:
        cells = [plain(tile["label"]), plain(tile["value"], "bold")]
        note = plain(tile["note"], "dim")
        grid.add_row(*cells, *(() if narrow else (note,)))
        if narrow:
            grid.add_row("", note)
    return grid


def _entry(entries: Sequence[Entry], given: dict[str, str]) -> Text:
    """Return an assessment; advice that is ``given`` already is not repeated."""
    entry = entries[0]
    names = "; ".join(member.name for member in entries)
    advice = entry.text("recommendation")
    first = given.setdefault(advice, names)
    sign, colour, _ = LOOKS[entry.severity]
    return Text.assemble(
        (f"{sign} ", colour),
        plain(names, "bold"),
        "  ",
        plain(entry.text("headline")),
        "\n",
        ("What to do: ", "bold"),
        plain(advice if first == names else f"as for {first}."),
    )


def show_command(command: str, console: Console) -> None:
    """Print a command in one piece, to be pasted; nothing for none."""
    if command:
        console.print(labelled("  Run", command), soft_wrap=True)


SUMMARY_LINES = 12  # lines on a terminal of 80 columns at most, with the two that point to more

_ACTION = "What to do"
_SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z])")
_NO_ACTION = re.compile(r"Nothing\b|If .*\bnothing is wrong\.$")  # another sentence says what to do


def render_summary(run: Run, assessment: Assessment, console: Console) -> None:
    """Print a run's verdict in :data:`SUMMARY_LINES` lines; on a narrow terminal, in a few more."""
    found = ranked(run.findings())
    causes = explanations(found)
    heads = [finding for finding in found if causes[finding.id] is None]
    followers = [section_of(each.id, each.cause) for each in found if causes[each.id] is not None]
    sheet = _Sheet(console, SUMMARY_LINES - 2 - bool(assessment.command))
    title = title_of(run.info, run.path)
    sheet.add(verdict_lines(assessment.word, assessment.headline, title))
    if assessment.ending not in assessment.headline:
        sheet.add(plain(assessment.ending))
    kept_free = min(len(heads), 2) + (len(heads) > 2 or bool(followers))
    sheet.add(_action(assessment.recommendation, sheet, kept_free))
    shown = 0
    for finding in heads:
        line = _line(finding, run.num_workers)
        is_last = finding is heads[-1] and not followers
        if shown and not sheet.fits(line, kept_free=0 if is_last else 1):
            break
        sheet.add(line)
        shown += 1
    if rest := _rest(heads[shown:], followers):
        sheet.add(plain(rest, "dim"))
    if (assessment.severity or Severity.NOTE) is Severity.NOTE:
        known = tiles(assessment.values)
        numbers = [each for each in known if any(map(str.isdigit, each["value"]))]
        narrow = console.width < NARROW
        while numbers and not sheet.fits(numbers_grid(numbers, narrow=narrow)):
            numbers.pop()
        if numbers:
            sheet.add(numbers_grid(numbers, narrow=narrow))
    sheet.show()
    show_command(assessment.command, console)
    more = labelled("  More", f"rankscope report {shlex.quote(str(run.path))} --full")
    console.print(more, soft_wrap=True)  # in one piece, to be pasted


class _Sheet:
    """Parts that are printed one below the other; ``room`` is the number of lines left."""

    def __init__(self, console: Console, room: int) -> None:
        self._console = console
        self.room = room
        self._parts: list[RenderableType] = []

    def fits(self, part: RenderableType, *, kept_free: int = 0) -> bool:
        """Return whether a part fits, with some lines kept free."""
        return len(readable_lines(self._console, part)) + kept_free <= self.room

    def add(self, part: RenderableType) -> None:
        """Add a part."""
        self._parts.append(part)
        self.room -= len(readable_lines(self._console, part))

    def show(self) -> None:
        """Print all parts, apart from each other as far as lines are left."""
        for place, part in enumerate(self._parts):
            if place in (1, 2) and self.room > 0:
                self._console.print()
                self.room -= 1
            show(self._console, part)


def _action(words: str, sheet: _Sheet, kept_free: int) -> Text:
    """Return as many sentences of the advice as fit, but at least up to the first action."""
    whole = labelled(_ACTION, words)
    if sheet.fits(whole, kept_free=kept_free):
        return whole
    sentences = _SENTENCE.split(words)
    acts = (n for n, sentence in enumerate(sentences, 1) if not _NO_ACTION.match(sentence))
    ends = range(next(acts, len(sentences)), len(sentences))
    begun = [labelled(_ACTION, " ".join([*sentences[:n], "…"])) for n in ends]
    fitting = [text for text in begun if sheet.fits(text, kept_free=kept_free)]
    return [*begun[:1], *fitting, whole][len(fitting) if begun else 0]


def _line(finding: Finding, num_workers: int) -> Text:
    """Return a finding in a line: title, ranks, steps, and its name in the documentation."""
    sign, colour, _ = LOOKS[str(finding.severity)]
    where = f"{ranks_in_words(finding.ranks, num_workers)} · {steps_in_words(finding)}"
    return Text.assemble(
        (f"{sign} ", f"bold {colour}"),
        plain(title_of_finding(finding), "bold"),
        "  ",
        plain(where, colour),
        "  ",
        plain(section_of(finding.id, finding.cause), "dim"),
    )


def _rest(findings: Sequence[Finding], followers: Sequence[str]) -> str:
    """Return what has no line of its own: findings, and those that follow from others, by name."""
    severities = Counter(str(finding.severity) for finding in findings)
    words = [count(number, severity) for severity, number in severities.items()]
    parts = [f"Also {listed(words)}."] if words else []
    if followers:
        most = 1 if words else 2  # in a line of 80 columns
        parts.append(f"Consequences: {shortened(list(dict.fromkeys(followers)), most)}.")
    return " ".join(parts)

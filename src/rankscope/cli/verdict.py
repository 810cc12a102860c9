"""The verdict in the terminal: what is wrong first, then what to do, then the numbers.

Text from records is printed as it is: never read as markup, and without control characters that
could move the cursor.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from rankscope.cli.output import LONGEST, heading, plain, points, show
from rankscope.diagnose.assessment import Assessment
from rankscope.record import Run
from rankscope.web.study_words import (
    Entry,
    Study,
    alike,
    cells_of,
    headline_of,
    open_study,
    why_heading,
    why_they_differ,
)
from rankscope.web.words import SIGNS, verdict_of

NARROW = 76
"""Columns below which notes go on lines of their own."""
_LEAST_WIDTHS = {
    "Norm std": NARROW,
    "Averaged loss": 104,
    "× sampling": 104,
    "Different per step": LONGEST + 1,
}
"""Width of the lines from which the study's table has a column; the others it always has."""


_COLOURS = {
    "healthy": "green",
    "early": "cyan",
    "note": "blue",
    "warning": "yellow",
    "error": "red",
}
LOOK = {name: (sign, _COLOURS[name]) for name, sign in SIGNS.items()}
"""Sign and colour of each verdict."""


def render_run(run: Run, assessment: Assessment, console: Console) -> None:
    """Print all that a run's report says.

    Raises:
        RunError: The findings cannot be read.
    """
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
        heading(console, "What the measurements say")
        points(console, assessment.statements)
    console.print()


def render_differences(differences: Sequence[str], status: str, console: Console) -> None:
    """Print how the findings of a new diagnosis differ from those that the run has told."""
    heading(console, "Diagnosed again", space=False)
    if not differences:
        show(console, plain("The findings are those in findings.jsonl."))
    else:
        show(console, plain("These findings are not those in findings.jsonl."))
        points(console, differences)
        if status == "running":
            show(console, plain("The run is not closed: it may have changes yet to tell."))
    console.print()


def render_study(study_dir: Path, console: Console) -> None:
    """Print the verdict of a study: its configurations side by side, and why they differ.

    Raises:
        RunError: The directory is not a study.
    """
    study = open_study(study_dir)
    severity, headline = headline_of(study.entries)
    console.print()
    show(console, verdict_lines(severity, headline, study.name))
    show(console, plain(study.caption, "dim"))
    console.print()
    show(console, _study_table(study, console.width))
    for entries in alike(study.entries):
        if entries[0].severity != "healthy":
            console.print()
            show(console, _entry(entries))
    heading(console, why_heading(study.entries))
    for title, words in why_they_differ(study.entries):
        show(console, labelled(title, words))
        console.print()


def verdict_lines(severity: str, headline: str, title: str) -> Text:
    """Return a verdict, of what, and its headline below."""
    sign, colour = LOOK[severity]
    return Text.assemble(
        (f"{sign} {'TOO EARLY' if severity == 'early' else severity.upper()}", f"bold {colour}"),
        ("  ", ""),
        plain(title, "dim"),
        "\n",
        plain(headline, "bold"),
    )


def _finding(finding: Mapping[str, Any]) -> Text:
    sign, colour = LOOK[finding["severity"]]
    return Text.assemble(
        (f"{sign} {finding['severity']}", f"bold {colour}"),
        "  ",
        plain(finding["title"], "bold"),
        "  ",
        plain(finding["cause"], "dim"),
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


def _study_table(study: Study, width: int) -> RenderableType:
    rows = [cells_of(entry) for entry in study.entries]
    columns = [name for name in rows[0] if min(width, LONGEST) >= _LEAST_WIDTHS.get(name, 0)]
    table = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in columns:
        left = name in {"Setting", "Verdict"}
        table.add_column(name, justify="left" if left else "right", no_wrap=not left)
    for entry, cells in zip(study.entries, rows, strict=True):
        colours = {"Verdict": LOOK[entry.severity][1]}
        table.add_row(*(plain(cells[name], colours.get(name, "")) for name in columns))
    return table


def _entry(entries: Sequence[Entry]) -> Text:
    entry = entries[0]
    sign, colour = LOOK[entry.severity]
    return Text.assemble(
        (f"{sign} ", colour),
        plain("; ".join(member.name for member in entries), "bold"),
        "  ",
        plain(entry.text("headline")),
        "\n",
        ("What to do: ", "bold"),
        plain(entry.text("recommendation")),
    )


def show_command(command: str, console: Console) -> None:
    """Print a command in one piece, to be pasted; nothing for none."""
    if command:
        console.print(labelled("  Run", command), soft_wrap=True)


def labelled(label: str, words: str) -> Text:
    """Return words with a label before them."""
    return Text.assemble((f"{label}: ", "bold"), plain(words))

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

from rankscope.cli.output import heading, plain, points, show
from rankscope.diagnose.assessment import Assessment
from rankscope.record import Run
from rankscope.web.study_words import (
    Entry,
    Study,
    alike,
    headline_of,
    open_study,
    why_heading,
    why_they_differ,
)
from rankscope.web.words import SIGNS, number, verdict_of, whole

NARROW = 76
"""Columns below which notes go on lines of their own."""
WIDE = 104
"""Columns from which the study's table shows everything."""


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
    table = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    columns = _columns(width)
    for name in columns:
        left = name in {"Setting", "Verdict"}
        table.add_column(name, justify="left" if left else "right", no_wrap=not left)
    for entry in study.entries:
        cells = _cells(entry)
        table.add_row(*(cells[name] for name in columns))
    return table


def _columns(width: int) -> list[str]:
    columns = ["Setting", "Verdict", "Loss std", "Norm std", "Cosine", "Different", "Drawn"]
    if width < NARROW:
        return [name for name in columns if name not in {"Norm std", "Drawn"}]
    return [*columns, "Loss std/expected", "Loss"] if width >= WIDE else columns


def _cells(entry: Entry) -> dict[str, Text]:
    sign, colour = LOOK[entry.severity]
    first, last = entry.number("loss_first"), entry.number("loss_last")
    return {
        "Setting": plain(entry.name),
        "Verdict": Text(f"{sign} {entry.severity}", style=colour),
        "Loss std": Text(number(entry.number("loss_std"))),
        "Loss std/expected": Text(number(entry.number("dispersion_ratio"), 2)),
        "Norm std": Text(number(entry.number("grad_norm_std"))),
        "Cosine": Text(number(entry.number("cosine_mean"))),
        "Different": Text(whole(entry.number("distinct_samples"))),
        "Drawn": Text(whole(entry.number("samples_drawn"))),
        "Loss": Text(f"{number(first, 2)} → {number(last, 2)}"),
    }


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

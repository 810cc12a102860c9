"""The preflight in the terminal: a table, what to do, and the verdict; and as one document."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from rankscope.cli.output import plain, show
from rankscope.diagnose.rules import count
from rankscope.doctor import CheckResult, Status, worst
from rankscope.record.files import to_plain

_LOOK = {
    Status.OK: ("✓", "green"),
    Status.NOTE: ("–", "blue"),
    Status.WARNING: ("!", "yellow"),
    Status.ERROR: ("✗", "red"),
    Status.SKIPPED: ("·", "dim"),
}
_WORTH_ADVICE = (Status.ERROR, Status.WARNING, Status.NOTE)


def render_checkup(results: Sequence[CheckResult], seconds: float, console: Console) -> None:
    """Print all results, what to do about those that are not well, and the verdict.

    Args:
        results: In the order in which they were made.
        seconds: How long the preflight took.
        console: Where to print.
    """
    console.print()
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=1)
    grid.add_column(no_wrap=console.width >= 72)
    grid.add_column()
    for result in results:
        sign, colour = _LOOK[result.status]
        dim = "dim" if result.status is Status.SKIPPED else ""
        grid.add_row(
            Text(sign, style=f"bold {colour}"),
            plain(result.title, dim),
            plain(result.found, dim),
        )
    show(console, grid)
    troubled = [
        result
        for status in _WORTH_ADVICE
        for result in results
        if result.status is status and result.advice
    ]
    if troubled:
        console.print()
        show(console, Text("What to do", style="bold underline"))
    for result in troubled:
        sign, colour = _LOOK[result.status]
        show(
            console,
            Text.assemble(
                (f"{sign} ", f"bold {colour}"),
                plain(f"{result.title}: ", "bold"),
                plain(result.advice),
            ),
        )
    console.print()
    show(console, _verdict(results, seconds))
    console.print()


def to_document(results: Sequence[CheckResult], seconds: float) -> dict[str, Any]:
    """Return the preflight as one JSON document."""
    status = worst(results)
    document: dict[str, Any] = to_plain(
        {
            "kind": "doctor",
            "status": str(status),
            "verdict": verdict_in_words(results),
            "seconds": seconds,
            "checks": [result.to_json() for result in results],
        }
    )
    return document


def verdict_in_words(results: Sequence[CheckResult]) -> str:
    """Return the verdict in a sentence."""
    status = worst(results)
    titles = [result.title for result in results if result.status is status]
    listed = ", ".join(title[0].lower() + title[1:] for title in titles)
    if status is Status.ERROR:
        return f"Not ready: {count(len(titles), 'check')} failed ({listed})."
    if status is Status.WARNING:
        return f"Can start, but look at {count(len(titles), 'warning')} first ({listed})."
    done = sum(result.status is not Status.SKIPPED for result in results)
    notes = sum(result.status is Status.NOTE for result in results)
    noted = f", with {count(notes, 'note')}" if notes else ""
    left = len(results) - done
    skipped = f"; {left} skipped" if left else ""
    return f"Ready: {count(done, 'check')} made, nothing wrong{noted}{skipped}."


def _verdict(results: Sequence[CheckResult], seconds: float) -> Text:
    sign, colour = _LOOK[worst(results)]
    return Text.assemble(
        (f"{sign} ", f"bold {colour}"),
        plain(verdict_in_words(results), "bold"),
        (f"\nChecked in {seconds:.1f} s", "dim"),
    )
